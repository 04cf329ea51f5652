"""Blocks and pages: shared texts are the texts themselves, memory that ends costs nobody a token, and nobody waits."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.cache.base import CacheUsage
from outrider.cache.paged import CacheFull
from outrider.cache.prefix_tree import BLOCK, PrefixTree, common_prefix
from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, FinishReason, Request, Scores
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.testing.drive import make_row
from outrider.testing.toy_target import ToyTarget
from tests.helpers import tiny
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run, tightened

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80)
    return tiny.save(tmp_path_factory.mktemp("paged") / "llama", config)


def read(folder, *, blocks=None, slots=4, context=256, dtype="bfloat16"):
    checkpoint = load_checkpoint(folder, dtype=dtype, device="cpu")
    target = make_target(checkpoint, slots=slots, context=context, kernels="native")
    if blocks:
        target.cache.resize(blocks)
    target.cache.set_prefix_caching(True)
    return target


def ids(count, seed=0):
    chance = random.Random(seed)
    return [chance.randrange(250) for _ in range(count)]


def feed(target, slot, text, scope="one"):
    """Logits at the text's end, and how much of it was cached."""
    row = tiny.admit(target, slot, text)
    row.num_cached_tokens = target.cache.admit(slot, text, scope)
    batch = tiny.everything([row])
    with torch.inference_mode():
        scores = target.score(batch, tree.empty(1, CPU))
        target.cache.commit(tree.prefill_round(batch, tree.empty(1, CPU), scores))
    return scores.logits[0, 0], row.num_cached_tokens


@compiled
@BOTH
@pytest.mark.parametrize("same", [1, 63, 64, 65, 100, 128, 149])
def test_a_shared_beginning_is_the_text_itself(folder, same, dtype):
    target, first = read(folder, dtype=dtype), ids(150)
    text = [*first[:same], 249 - first[same], *ids(20, seed=same)]
    wanted, _ = feed(read(folder, dtype=dtype), 1, text)
    feed(target, 0, first)
    beside, cached = feed(target, 1, text)  # of a row that runs it may share whole blocks, and parts of these
    assert cached == min(same, 128)
    target.cache.release(1)
    target.cache.release(0)
    other = [*first[:same], 249 - first[same], 3]
    after, cached = feed(target, 2, other)
    assert cached == same + 1
    assert feed(target, 3, other, "another")[1] == 0
    assert torch.equal(beside, wanted)
    assert torch.equal(after, feed(read(folder, dtype=dtype), 2, other)[0])


@compiled
def test_the_same_text_again_feeds_its_last_token_alone(folder):
    target, text = read(folder), ids(130)
    wanted, _ = feed(target, 0, text)
    target.cache.release(0)
    found, cached = feed(target, 1, text)
    assert cached == len(text) - 1
    assert torch.equal(found, wanted)


@compiled
@BOTH
def test_rows_that_write_the_same_hold_it_once(folder, dtype):
    target, text = read(folder, slots=4, dtype=dtype), ids(140)
    rows = [tiny.admit(target, slot, text) for slot in range(4)]
    for row in rows:
        target.cache.admit(row.slot, text, "one")
    batch, none = tiny.everything(rows), tree.empty(4, CPU)
    with torch.inference_mode():
        target.cache.commit(tree.prefill_round(batch, none, target.score(batch, none)))
        assert target.cache.usage().used_blocks == 2 + 4
        for row in rows:
            row.num_cached_tokens = len(text)
            row.token_ids.append(7)
        on = target.score(tiny.everything(rows), none).logits
    assert all(torch.equal(each, on[0]) for each in on)


@compiled
def test_swapped_weights_and_exported_layers_share_nothing(folder):
    target, text = read(folder), ids(130)
    feed(target, 0, text)
    target.cache.release(0)
    target.update_weights({"model.norm.weight": torch.ones(48)}, 1)
    assert feed(target, 0, text)[1] == 0
    target.cache.release(0)
    assert feed(target, 0, text)[1] == len(text) - 1
    target.export_hidden_states((1,))
    assert feed(target, 1, text)[1] == 0


@compiled
def test_what_was_left_longest_ago_goes_first_and_leaves_before_stems(folder):
    target = read(folder, blocks=8)
    texts = [ids(130, seed) for seed in range(3)]  # three blocks each
    for text in texts[:2]:
        feed(target, 0, text)
        target.cache.release(0)
    feed(target, 0, texts[0])  # used again
    target.cache.release(0)
    use = target.cache.usage()
    assert (use.used_blocks, use.cached_blocks, use.free_blocks) == (0, use.cached_blocks, 8 - use.cached_blocks)
    feed(target, 0, texts[2])
    target.cache.release(0)
    assert target.cache.usage().evicted_blocks
    lengths = [target.cache.admit(1, text, "one") for text in texts]
    assert lengths[0] == lengths[2] == 129
    assert lengths[1] < 129


def test_pages_keep_their_counts():
    pages, chance = PrefixTree(), random.Random(0)
    paths: list[list] = []
    made, gone = 0, 0
    for _ in range(4000):
        action = chance.random()
        if action < 0.4:
            text = tuple(chance.randrange(2) for _ in range(BLOCK * chance.randint(1, 4)))
            found, _, _ = pages.match("", text)
            for page in found:
                pages.acquire(page)
            path = found
            for begin in range(BLOCK * len(found), len(text), BLOCK):
                page = pages.insert("", path[-1] if path else None, text[begin : begin + BLOCK], made)
                made += 1
                pages.acquire(page)
                path.append(page)
            paths.append(path)
        elif action < 0.7 and paths:
            for page in reversed(paths.pop(chance.randrange(len(paths)))):
                pages.release(page)
        elif pages.idle:
            block = pages.evict()
            gone += 1
            assert all(page.index != block for path in paths for page in path)
        held = {page for path in paths for page in path}
        assert made - gone == pages.idle + len(held)
    while pages.idle:
        pages.evict()
    assert pages.evicted == made - len(held)


def test_shared():
    assert common_prefix((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([5] * 9, [5] * 7) == 7


def prompts(count, length=70):
    opening = ids(40)
    return [opening + ids(length - 40, seed) for seed in range(1, count + 1)]


def proposer(name, folder, blocks=None, dtype="bfloat16"):
    if name == "model":
        own = {"blocks": blocks, "dtype": dtype}
        return lambda setup: DraftModelProposer(setup, read(folder, slots=setup.slots, context=setup.context, **own))
    return EVERY[name]


@compiled
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in ("none", "ngram", "suffix with history", "recycle", "lookahead", "model")),
        *((name, "float32") for name in ("none", "recycle", "model")),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_memory_that_ends_changes_no_token(folder, name, dtype, temperature):
    """The rows that come last give way, come back, and write what they would have written."""
    params = SamplingParams(temperature=temperature, seed=3)
    wide = make_engine(read(folder, dtype=dtype), proposer(name, folder, dtype=dtype), rows=4)
    wanted = run(wide, prompts(6), params, limit=180, ends=frozenset())
    tight = make_engine(read(folder, blocks=7, dtype=dtype), proposer(name, folder, 7, dtype), rows=4)
    found = run(tight, prompts(6), params, limit=180, ends=frozenset())
    assert outputs(found) == outputs(wanted)
    use = tight.cache_usage()
    assert use.preempted > 0
    assert wide.cache_usage().preempted == 0
    assert (use.used_blocks, use.blocks) == (0, 7)


@compiled
@pytest.mark.parametrize("rounds", [0, 1, 2, 9, 20, 35, 50, 65, 80])
def test_whoever_is_taken_back_leaves_no_block_behind(folder, rounds):
    engine = make_engine(read(folder, blocks=7), proposer("model", folder, 7), rows=4, chunk=50)
    wanted = run(
        make_engine(read(folder), EVERY["none"], k=0), prompts(1), SamplingParams(), limit=180, ends=frozenset()
    )
    for id, prompt in enumerate(prompts(5)):
        engine.add(
            Request(
                id=id,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(),
                seed=0,
                end_ids=frozenset(),
                max_tokens=180,
            )
        )
    for _ in range(rounds):
        engine.step()
    for id in (4, 1, 2):
        engine.abort(id)
    done = {}
    while engine.busy():
        done |= {row.request.id: row for row in engine.step() if row.finish_reason}
    assert set(done) <= {0, 3}
    assert 0 not in done or outputs([done[0]]) == outputs(wanted)
    assert all(row.finish_reason is FinishReason.LENGTH for row in done.values())
    assert engine.cache_usage().used_blocks == 0


@compiled
def test_a_request_that_never_fits_is_refused(folder):
    engine = make_engine(read(folder), EVERY["none"], rows=4)
    with pytest.raises(OutriderError, match="the context holds 256"):
        engine.add(
            Request(
                id=0, prompt_token_ids=(1,) * 256, params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
            )
        )


@compiled
def test_entries_are_as_wide_as_the_model(folder):
    narrow, wide = (read(folder, dtype=dtype).cache for dtype in ("bfloat16", "float32"))
    assert wide.usage().token_bytes == 2 * narrow.usage().token_bytes == 4 * tiny.LAYERS * 2 * 2 * 16
    assert wide.bytes() == 2 * narrow.bytes()


@compiled
def test_caches_are_given_what_was_asked_for():
    draft = f"draft:{embedded('nano')}"
    llm = LLM(
        None,
        proposer=draft,
        k=3,
        dtype="bfloat16",
        kernels="native",
        max_num_seqs=4,
        max_model_len=256,
        cache_gb=0.02,
    )
    use, model = llm.engine.cache_usage(), llm.parts.proposer.model
    both = llm.parts.target.cache.bytes() + model.cache.bytes()
    assert 0.015e9 < both <= 0.02e9
    assert use.blocks == model.cache.usage().blocks
    texts = ["Once upon a time there was a", "Once upon a time there was another"] * 2
    with_room = LLM(None, proposer=draft, k=3, dtype="bfloat16", kernels="native", max_num_seqs=4, max_model_len=256)
    params = SamplingParams(max_tokens=30)
    assert [c.token_ids for c in llm.generate(texts, params)] == [
        c.token_ids for c in with_room.generate(texts, params)
    ]
    llm.generate(texts, params)
    assert llm.engine.cache_usage().hit_tokens > 0
    with pytest.raises(OutriderError, match="give more, or lower max_model_len"):
        LLM(
            None,
            proposer=draft,
            k=3,
            dtype="bfloat16",
            kernels="native",
            max_num_seqs=4,
            max_model_len=256,
            cache_gb=0.0001,
        )
    with pytest.raises(OutriderError, match="set max_num_seqs and max_model_len"):
        LLM(None, proposer="none", k=0, kernels="torch", max_num_seqs=4, max_model_len=256, cache_gb=0.02)


@compiled
def test_a_draft_that_goes_on_with_the_text_has_no_more_memory_than_it_is_given():
    """Rows that begin alike take little of the target's memory, and each one all that it has of the draft's."""
    texts = ["".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(25)) + end for end in "abcd"]
    params, settings = SamplingParams(max_tokens=24), {"dtype": "bfloat16", "kernels": "native", "max_num_seqs": 4}
    plain = LLM(None, proposer="none", k=0, max_model_len=512, **settings)
    spec = f"draft-text:{embedded('nano')}"
    llm = LLM(None, proposer=spec, k=3, max_model_len=512, cache_gb=0.0045, **settings)
    assert [c.token_ids for c in llm.generate(texts, params)] == [c.token_ids for c in plain.generate(texts, params)]
    assert llm.stats.draft_tokens > 0


@compiled
def test_a_full_cache_says_so(folder):
    target = read(folder, blocks=2)
    with pytest.raises(CacheFull, match="all 2 blocks of 64 tokens are in use"):
        feed(target, 0, ids(130))


def test_a_stripe_keeps_its_text_for_the_next_one():
    llm = LLM(None, proposer="ngram", k=3, dtype="float32", kernels="torch", max_num_seqs=3, max_model_len=128)
    params = SamplingParams(max_tokens=12)
    first = llm.generate("Once upon a time there was a king", params)[0]
    asked = llm.engine.cache_usage().query_tokens
    again = llm.generate("Once upon a time there was a king", params)[0]
    use = llm.engine.cache_usage()
    assert first.token_ids == again.token_ids
    assert use.hit_tokens == asked - 1
    other = llm.generate("Once upon a time there was a king", SamplingParams(max_tokens=12, scope="tenant"))[0]
    assert other.token_ids == first.token_ids
    assert llm.engine.cache_usage().hit_tokens == use.hit_tokens


def test_of_stripes_that_begin_alike_the_slots_own_is_not_copied():
    cache, none, text = StaticCache(slots=3, capacity=16, device=CPU), tree.empty(1, CPU), ids(9)
    cache.set_prefix_caching(True)
    for slot in range(3):
        row = make_row(text, slot)
        cache.admit(slot, text, f"scope {slot}")  # so that each one is read
        batch = tiny.everything([row])
        values = torch.full((1, len(text), 4), float(slot + 1))
        cache.write(0, cache.stage(batch, none), values, values)
        cache.commit(tree.prefill_round(batch, none, Scores(logits=torch.zeros(1, 1, 9))))
    cache._scopes = ["one"] * 3
    for slot in (1, 0):
        assert cache.admit(slot, text, "one") == len(text) - 1
        assert cache.entries(0, [slot], 0, 8)[0].unique().tolist() == [slot + 1]


def test_nothing_is_known_of_other_caches():
    assert CacheUsage().free_blocks == 0
    assert Batch(seqs=(), start=(), feed=(), draft_budget=()).num_waiting == 0


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_proposer_lives_through_rows_that_give_way(name, temperature):
    params = SamplingParams(temperature=temperature, seed=5)
    texts = [[1, 2, 3, id] for id in range(3)]
    found = []
    for room in (10**6, 150):
        engine = make_engine(tightened(ToyTarget(slots=4), room), EVERY[name], rows=4)
        found.append(outputs(run(engine, texts, params, limit=90, ends=frozenset())))
    assert engine.cache_usage().preempted > 0
    assert found[0] == found[1]


@compiled
def test_a_draft_that_reads_states_sees_every_token():
    """What is cached has no states: with such a draft nothing is shared, and rows that come back are read again."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    texts = ["Once upon a time there was a king", "Once upon a time there was a queen", "def add(a, b):", "1, 2, 3"]
    house = {"dtype": "bfloat16", "kernels": "native", "max_num_seqs": 4, "max_model_len": 256}
    plain = LLM(None, proposer="none", k=0, **house).generate(texts, params)
    llm = LLM(None, proposer=f"draft:{embedded('eagle31')}", k=3, **house)
    for cache in (llm.parts.target.cache, llm.parts.proposer.model.cache):
        cache.resize(6)
    for _ in range(2):
        assert [c.token_ids for c in llm.generate(texts, params)] == [c.token_ids for c in plain]
    use = llm.engine.cache_usage()
    assert use.hit_tokens == 0
    assert use.preempted > 0
    assert sum(llm.stats.accepted) > 0
