"""Tests of paged and static caches: prefix caching, eviction, and preemption when memory is full."""

import random

import pytest
import torch

from outrider.core import tree
from outrider.core.cache import CacheUsage
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, FinishReason, Request, Scores
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.cache.paged import CacheFull
from outrider.models.cache.prefix_tree import BLOCK, PrefixTree, common_prefix
from outrider.models.cache.static import StaticCache
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import make_seq
from outrider.testing.toy_target import ToyTarget
from tests.helpers import tiny
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run, tightened

CPU = torch.device("cpu")
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80)
    return tiny.save(tmp_path_factory.mktemp("paged") / "llama", config)


def load(folder, *, blocks=None, slots=4, context=256, dtype="bfloat16"):
    checkpoint = load_checkpoint(folder, dtype=dtype, device="cpu")
    target = make_target(checkpoint, slots=slots, context=context, kernels="native")
    if blocks:
        target.cache.resize(blocks)
    target.cache.set_prefix_caching(True)
    return target


def random_tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


def prefill(target, slot, tokens, scope="one"):
    """Prefill tokens. Return the logits after them, and how many of them were cached before."""
    seq = tiny.admit(target, slot, tokens)
    seq.num_cached_tokens = target.cache.admit(slot, tokens, scope)
    batch = tiny.everything([seq])
    with torch.inference_mode():
        scores = target.score(batch, tree.empty(1, CPU))
        target.cache.commit(tree.prefill_round(batch, tree.empty(1, CPU), scores))
    return scores.logits[0, 0], seq.num_cached_tokens


@pytest.mark.fast_cases("1-bfloat16", "63-float32", "64-bfloat16", "65-float32")
@compiled
@BOTH_DTYPES
@pytest.mark.parametrize("common", [1, 63, 64, 65, 100, 128, 149])
def test_shared_prefix_gives_the_logits_of_a_fresh_prefill(folder, common, dtype):
    target = load(folder, dtype=dtype)
    first = random_tokens(150)
    second = [*first[:common], 249 - first[common], *random_tokens(20, seed=common)]
    expected, _ = prefill(load(folder, dtype=dtype), 1, second)
    prefill(target, 0, first)
    actual, cached = prefill(target, 1, second)  # it shares only full blocks of a running sequence, or parts of them
    assert cached == min(common, 128)
    target.cache.release(1)
    target.cache.release(0)
    third = [*first[:common], 249 - first[common], 3]
    logits, cached = prefill(target, 2, third)
    assert cached == common + 1
    assert prefill(target, 3, third, "another")[1] == 0
    assert torch.equal(actual, expected)
    assert torch.equal(logits, prefill(load(folder, dtype=dtype), 2, third)[0])


@compiled
def test_repeated_prompt_feeds_only_its_last_token(folder):
    target = load(folder)
    prompt = random_tokens(130)
    expected, _ = prefill(target, 0, prompt)
    target.cache.release(0)
    actual, cached = prefill(target, 1, prompt)
    assert cached == len(prompt) - 1
    assert torch.equal(actual, expected)


@compiled
@BOTH_DTYPES
def test_equal_sequences_of_one_batch_share_full_blocks(folder, dtype):
    target = load(folder, slots=4, dtype=dtype)
    prompt = random_tokens(140)
    seqs = [tiny.admit(target, slot, prompt) for slot in range(4)]
    for seq in seqs:
        target.cache.admit(seq.slot, prompt, "one")
    batch = tiny.everything(seqs)
    empty = tree.empty(4, CPU)
    with torch.inference_mode():
        target.cache.commit(tree.prefill_round(batch, empty, target.score(batch, empty)))
        assert target.cache.usage().used_blocks == 2 + 4
        for seq in seqs:
            seq.num_cached_tokens = len(prompt)
            seq.token_ids.append(7)
        logits = target.score(tiny.everything(seqs), empty).logits
    assert all(torch.equal(seq_logits, logits[0]) for seq_logits in logits)


@compiled
def test_weight_updates_and_exported_layers_disable_sharing(folder):
    target = load(folder)
    text = random_tokens(130)
    prefill(target, 0, text)
    target.cache.release(0)
    target.update_weights({"model.norm.weight": torch.ones(48)}, 1)
    assert prefill(target, 0, text)[1] == 0
    target.cache.release(0)
    assert prefill(target, 0, text)[1] == len(text) - 1
    target.export_hidden_states((1,))
    assert prefill(target, 1, text)[1] == 0


@compiled
def test_least_recently_used_blocks_are_evicted_first(folder):
    target = load(folder, blocks=8)
    texts = [random_tokens(130, seed) for seed in range(3)]  # three blocks each
    for text in texts[:2]:
        prefill(target, 0, text)
        target.cache.release(0)
    prefill(target, 0, texts[0])  # used again
    target.cache.release(0)
    usage = target.cache.usage()
    assert usage.used_blocks == 0
    assert usage.free_blocks == 8 - usage.cached_blocks
    prefill(target, 0, texts[2])
    target.cache.release(0)
    assert target.cache.usage().evicted_blocks
    lengths = [target.cache.admit(1, text, "one") for text in texts]
    assert lengths[0] == lengths[2] == 129
    assert lengths[1] < 129


def test_counts_of_the_prefix_tree():
    prefix_tree = PrefixTree()
    rng = random.Random(0)
    paths: list[list] = []  # blocks in use, by sequence
    inserted = 0
    evicted = 0
    for _ in range(4000):
        action = rng.random()
        if action < 0.4:
            tokens = tuple(rng.randrange(2) for _ in range(BLOCK * rng.randint(1, 4)))
            path, _, _ = prefix_tree.match("", tokens)
            for block in path:
                prefix_tree.acquire(block)
            for begin in range(BLOCK * len(path), len(tokens), BLOCK):
                block = prefix_tree.insert("", path[-1] if path else None, tokens[begin : begin + BLOCK], inserted)
                inserted += 1
                prefix_tree.acquire(block)
                path.append(block)
            paths.append(path)
        elif action < 0.7 and paths:
            for block in reversed(paths.pop(rng.randrange(len(paths)))):
                prefix_tree.release(block)
        elif prefix_tree.idle:
            index = prefix_tree.evict()
            evicted += 1
            assert all(block.index != index for path in paths for block in path)
        in_use = {block for path in paths for block in path}
        assert inserted - evicted == prefix_tree.idle + len(in_use)
    while prefix_tree.idle:
        prefix_tree.evict()
    assert prefix_tree.evicted == inserted - len(in_use)


def test_common_prefix():
    assert common_prefix((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([5] * 9, [5] * 7) == 7


def prompts(count, length=70):
    """Return prompts whose first 40 tokens are equal."""
    prefix = random_tokens(40)
    return [prefix + random_tokens(length - 40, seed) for seed in range(1, count + 1)]


def proposer(name, folder, blocks=None, dtype="bfloat16"):
    if name == "model":
        options = {"blocks": blocks, "dtype": dtype}
        return lambda setup: DraftModelProposer(
            setup, load(folder, slots=setup.slots, context=setup.context, **options)
        )
    return EVERY[name]


@pytest.mark.fast_cases("recycle-bfloat16-0.0", "model-bfloat16-1.0", "model-float32-0.0")
@compiled
@pytest.mark.parametrize(
    ("name", "dtype", "temperature"),
    [
        ("none", "bfloat16", 1.0),
        ("ngram", "bfloat16", 0.0),
        ("suffix with history", "bfloat16", 1.0),
        ("recycle", "bfloat16", 0.0),
        ("lookahead", "bfloat16", 1.0),
        ("model", "bfloat16", 0.0),
        ("model", "bfloat16", 1.0),
        ("recycle", "float32", 1.0),
        ("model", "float32", 0.0),
    ],
)
def test_preemption_does_not_change_outputs(folder, name, dtype, temperature):
    """The last sequences are preempted, continue later, and give the same tokens."""
    params = SamplingParams(temperature=temperature, seed=3)
    large = make_engine(load(folder, dtype=dtype), proposer(name, folder, dtype=dtype), rows=4)
    expected = run(large, prompts(6), params, limit=125, ends=frozenset())
    small = make_engine(load(folder, blocks=6, dtype=dtype), proposer(name, folder, 6, dtype), rows=4)
    actual = run(small, prompts(6), params, limit=125, ends=frozenset())
    assert outputs(actual) == outputs(expected)
    usage = small.cache_usage()
    assert usage.preempted > 0
    assert large.cache_usage().preempted == 0
    assert (usage.used_blocks, usage.blocks) == (0, 6)


@pytest.mark.fast_cases("0", "20", "80")
@compiled
@pytest.mark.parametrize("rounds", [0, 1, 2, 9, 20, 35, 50, 65, 80])
def test_aborted_requests_free_their_blocks(folder, rounds):
    engine = make_engine(load(folder, blocks=7), proposer("model", folder, 7), rows=4, chunk=50)
    expected = run(
        make_engine(load(folder), EVERY["none"], k=0), prompts(1), SamplingParams(), limit=180, ends=frozenset()
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
        done |= {seq.request.id: seq for seq in engine.step() if seq.finish_reason}
    assert set(done) <= {0, 3}
    assert 0 not in done or outputs([done[0]]) == outputs(expected)
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in done.values())
    assert engine.cache_usage().used_blocks == 0


@compiled
def test_error_of_a_request_that_exceeds_the_context(folder):
    engine = make_engine(load(folder), EVERY["none"], rows=4)
    with pytest.raises(OutriderError, match="the context holds 256"):
        engine.add(
            Request(
                id=0, prompt_token_ids=(1,) * 256, params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=1
            )
        )


@compiled
def test_cache_dtype_follows_the_model(folder):
    bfloat16, float32 = (load(folder, dtype=dtype).cache for dtype in ("bfloat16", "float32"))
    assert float32.usage().token_bytes == 2 * bfloat16.usage().token_bytes == 4 * tiny.LAYERS * 2 * 2 * 16
    assert float32.bytes() == 2 * bfloat16.bytes()


@compiled
def test_cache_gb_sets_the_size_of_both_caches():
    sizes = {"max_num_seqs": 4, "max_model_len": 256}
    options = {"proposer": f"draft:{embedded('nano')}", "k": 3, "dtype": "bfloat16", "kernels": "native", **sizes}
    llm = LLM(None, **options, cache_gb=0.02)
    draft_model = llm.parts.proposer.model
    total_bytes = llm.parts.target.cache.bytes() + draft_model.cache.bytes()
    assert 0.015e9 < total_bytes <= 0.02e9
    assert llm.engine.cache_usage().blocks == draft_model.cache.usage().blocks
    texts = ["Once upon a time there was a", "Once upon a time there was another"] * 2
    unlimited = LLM(None, **options)
    params = SamplingParams(max_tokens=30)
    assert [c.token_ids for c in llm.generate(texts, params)] == [
        c.token_ids for c in unlimited.generate(texts, params)
    ]
    llm.generate(texts, params)
    assert llm.engine.cache_usage().hit_tokens > 0
    with pytest.raises(OutriderError, match="raise cache_gb, free memory, or lower max_model_len"):
        LLM(None, **options, cache_gb=0.0001)
    with pytest.raises(OutriderError, match="set max_num_seqs and max_model_len"):
        LLM(None, proposer="none", k=0, kernels="torch", **sizes, cache_gb=0.02)


@compiled
def test_memory_limit_of_a_text_draft():
    """Equal prefixes share blocks in the target's cache, but not in the cache of the draft model."""
    texts = ["".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(25)) + end for end in "abcd"]
    params = SamplingParams(max_tokens=24)
    settings = {"dtype": "bfloat16", "kernels": "native", "max_num_seqs": 4}
    plain = LLM(None, proposer="none", k=0, max_model_len=512, **settings)
    spec = f"draft-text:{embedded('nano')}"
    llm = LLM(None, proposer=spec, k=3, max_model_len=512, cache_gb=0.0045, **settings)
    assert [c.token_ids for c in llm.generate(texts, params)] == [c.token_ids for c in plain.generate(texts, params)]
    assert llm.stats.draft_tokens > 0


@compiled
def test_error_of_a_full_cache(folder):
    target = load(folder, blocks=2)
    with pytest.raises(CacheFull, match="all 2 blocks of 64 tokens are in use"):
        prefill(target, 0, random_tokens(130))


def test_static_cache_reuses_the_tokens_of_a_finished_sequence():
    llm = LLM(None, proposer="ngram", k=3, dtype="float32", kernels="torch", max_num_seqs=3, max_model_len=128)
    params = SamplingParams(max_tokens=12)
    first = llm.generate("Once upon a time there was a king", params)[0]
    prompt_tokens = llm.engine.cache_usage().query_tokens
    again = llm.generate("Once upon a time there was a king", params)[0]
    usage = llm.engine.cache_usage()
    assert first.token_ids == again.token_ids
    assert usage.hit_tokens == prompt_tokens - 1
    other = llm.generate("Once upon a time there was a king", SamplingParams(max_tokens=12, scope="tenant"))[0]
    assert other.token_ids == first.token_ids
    assert llm.engine.cache_usage().hit_tokens == usage.hit_tokens


def test_static_cache_prefers_the_prefix_in_its_own_slot():
    cache = StaticCache(slots=3, capacity=16, device=CPU)
    empty = tree.empty(1, CPU)
    text = random_tokens(9)
    cache.set_prefix_caching(True)
    for slot in range(3):
        seq = make_seq(text, slot)
        cache.admit(slot, text, f"scope {slot}")  # with different scopes, each sequence is prefilled
        batch = tiny.everything([seq])
        values = torch.full((1, len(text), 4), float(slot + 1))
        cache.write(0, cache.stage(batch, empty), values, values)
        cache.commit(tree.prefill_round(batch, empty, Scores(logits=torch.zeros(1, 1, 9))))
    cache._scopes = ["one"] * 3
    for slot in (1, 0):
        assert cache.admit(slot, text, "one") == len(text) - 1
        assert cache.entries(0, [slot], 0, 8)[0].unique().tolist() == [slot + 1]


def test_defaults_of_usage_and_batch():
    assert CacheUsage().free_blocks == 0
    assert Batch(seqs=(), start=(), feed=(), budget=DraftBudget(())).num_waiting == 0


@pytest.mark.fast_cases(
    "none-0.0",
    "padded model-0.0",
    "cascade-0.0",
    "short model-1.0",
    "suffix-1.0",
    "group-1.0",
    "lookahead-1.0",
    "best of three-1.0",
    "switch-1.0",
    "merge-1.0",
    "tree-1.0",
)
@pytest.mark.parametrize(("name", "temperature"), [(name, float(i % 2)) for i, name in enumerate(EVERY)])
def test_preemption_with_every_proposer(name, temperature):
    params = SamplingParams(temperature=temperature, seed=5)
    plain = make_engine(ToyTarget(slots=4), EVERY["none"], k=0, rows=4)
    engine = make_engine(tightened(ToyTarget(slots=4), 150), EVERY[name], rows=4)
    texts = [[1, 2, 3, id] for id in range(3)]
    actual, expected = (run(each, texts, params, limit=90, ends=frozenset()) for each in (engine, plain))
    assert outputs(actual) == outputs(expected)
    assert engine.cache_usage().preempted > 0


@compiled
def test_draft_head_disables_prefix_caching():
    """The cache has no hidden states. So nothing is shared, and preempted sequences are prefilled again."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    texts = ["Once upon a time there was a king", "Once upon a time there was a queen", "def add(a, b):", "1, 2, 3"]
    settings = {"dtype": "bfloat16", "kernels": "native", "max_num_seqs": 4, "max_model_len": 256}
    plain = LLM(None, proposer="none", k=0, **settings).generate(texts, params)
    llm = LLM(None, proposer=f"draft:{embedded('eagle31')}", k=3, **settings)
    for cache in (llm.parts.target.cache, llm.parts.proposer.model.cache):
        cache.resize(6)
    for _ in range(2):
        assert [c.token_ids for c in llm.generate(texts, params)] == [c.token_ids for c in plain]
    usage = llm.engine.cache_usage()
    assert usage.hit_tokens == 0
    assert usage.preempted > 0
    assert sum(llm.stats.accepted) > 0
