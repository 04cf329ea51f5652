"""Recurrent layers: states after every accepted node, batches, chunks of prompts, shared prefixes and drafts."""

import random

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.loader.make import make_target
from outrider.models.torch.recurrent import delta_rule, state_space
from outrider.models.torch.recurrent.rows import CHUNK
from outrider.testing import random_tree
from outrider.testing.drive import append, make_round
from tests.helpers import tiny
from tests.helpers.self_draft import check_draft_of_itself

NAMES = tiny.RECURRENT
TOLERANCE = 1e-4  # relative to the norm of the logits
OPTIONS = {"dtype": "float32", "device": "cpu"}
# Layers whose tokens can be processed by the state after each as well as by their inputs.
TWO_WAYS = ("mamba2", "minimax", "qwen3_5_text", "kimi_linear")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("recurrent"))


def relative_error(actual, expected):
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def commit(target, batch, draft, scores, paths, bonus):
    emitted = [
        (*(int(draft.tokens[b, node]) for node in path), token)
        for b, (path, token) in enumerate(zip(paths, bonus, strict=True))
    ]
    done = make_round(batch, draft, scores, [tuple(path) for path in paths], emitted)
    target.cache.commit(done)
    append(done)


def admit(target, slot, tokens):
    """Admit a sequence that may share a prefix with others."""
    seq = tiny.admit(target, slot, tokens)
    target.cache.release(slot)
    seq.num_cached_tokens = target.cache.admit(slot, tokens, "scope")
    return seq


def accept(target, seq, count, rng):
    """Run one round whose draft tokens, so many, are all accepted."""
    batch = tiny.everything([seq])
    draft = tree.chain(torch.tensor([tiny.text(rng, count)], dtype=torch.int64), (count,))
    commit(target, batch, draft, target.score(batch, draft), [range(count)], [rng.randrange(tiny.VOCAB)])


def next_logits(target, seqs):
    return target.score(tiny.everything(seqs), tree.empty(len(seqs), target.device)).logits[:, 0]


def expected_logits(model, seq):
    return model(torch.tensor([seq.token_ids]), use_cache=False).logits[0, -1]


@pytest.mark.fast_cases("mamba", "mamba2", "zamba", "qwen3_next", "olmo_hybrid", "zaya", "rwkv")
@pytest.mark.parametrize("name", NAMES)
def test_batch_of_many_lengths_equals_transformers(name, shelf):
    rng = random.Random(3)
    prompts = [tiny.text(rng, length) for length in (2, 3, 5, 8, 13, 21, 34, 55, 89, 70, 64, 65, 16, 17, 31, 2)]
    llm = LLM(shelf.folder(name), proposer="merge(ngram,recycle)", k=4, max_num_seqs=16, max_model_len=128, **OPTIONS)
    completions = llm.generate(prompts, SamplingParams(max_tokens=8))
    outputs = [list(completion.token_ids) for completion in completions]
    assert list(map(len, outputs)) == [8] * len(prompts)
    assert outputs == tiny.ranked_first(shelf.model(name), prompts, outputs)
    assert llm.stats.draft_tokens > 0


@pytest.mark.fast_cases(
    "mamba-1",
    "mamba2-1",
    "bamba-5",
    "falcon_h1-5",
    "zamba-1",
    "zamba2-5",
    "qwen3_next-1",
    "olmo_hybrid-1",
    "bailing_hybrid-5",
    "lfm2-5",
    "minimax-5",
    "zaya-1",
    "recurrent_gemma-5",
    "rwkv-1",
)
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_state_after_every_rejection(name, width, shelf):
    model = shelf.model(name)
    target = shelf.target(name)
    for accepted in range(width + 1):
        rng = random.Random(accepted)
        seq = tiny.admit(target, 1, tiny.text(rng, 11))
        batch = tiny.everything([seq])
        draft = tree.chain(torch.tensor([tiny.text(rng, width)]), (width,))
        commit(target, batch, draft, target.score(batch, draft), [range(accepted)], [rng.randrange(tiny.VOCAB)])
        assert relative_error(next_logits(target, [seq])[0], expected_logits(model, seq)) < TOLERANCE
        target.cache.release(1)


@pytest.mark.fast_cases("mamba", "mamba2", "zamba", "qwen3_next", "olmo_hybrid", "zaya", "rwkv")
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_chain_that_is_drafted_token_by_token(name, shelf):
    rng = random.Random(7)
    model = shelf.model(name)
    target = shelf.target(name)
    seqs = [tiny.admit(target, slot, tiny.text(rng, length)) for slot, length in ((0, 3), (2, 9))]
    for accepted in ((0, 2), (3, 0), (1, 3)):
        batch = tiny.everything(seqs)
        draft = tree.empty(2, target.device)
        scores = target.score(batch, draft)
        for depth in range(1, 5):
            tokens = torch.cat([draft.tokens, torch.randint(tiny.VOCAB, (2, 1))], 1)
            draft = tree.chain(tokens, (depth, depth))
            if depth < 4:
                scores = target.score(batch, draft, first=depth - 1)
                for b, seq in enumerate(seqs):
                    whole = seq.token_ids + tokens[b].tolist()
                    expected = model(torch.tensor([whole]), use_cache=False).logits[0, -1]
                    assert relative_error(scores.logits[b, -1], expected) < TOLERANCE
        commit(target, batch, draft, scores, [range(count) for count in accepted], [1, 2])
    for seq, logits in zip(seqs, next_logits(target, seqs), strict=True):
        assert relative_error(logits, expected_logits(model, seq)) < TOLERANCE


@pytest.mark.parametrize("name", TWO_WAYS)
@pytest.mark.parametrize("is_chain", [True, False])
@torch.inference_mode()
def test_both_ways_give_the_same_states(name, is_chain, shelf, monkeypatch):
    logits = {}
    for by_states in (False, True):
        for rule in (delta_rule, state_space):
            monkeypatch.setattr(rule, "keeps_states", lambda *_, choice=by_states: choice)
        rng = random.Random(2)
        target = shelf.target(name)
        seqs = [tiny.admit(target, slot, tiny.text(rng, 4 + 5 * slot)) for slot in range(3)]
        for _ in range(3):
            draft = random_tree([4, 2, 5], tiny.VOCAB, rng)
            if is_chain:
                draft = tree.chain(draft.tokens, draft.width)
            paths = [tiny.branch(draft, b, rng.randint(-1, width - 1)) for b, width in enumerate(draft.width)]
            batch = tiny.everything(seqs)
            commit(target, batch, draft, target.score(batch, draft), paths, [rng.randrange(tiny.VOCAB)] * 3)
        logits[by_states] = next_logits(target, seqs)
    assert relative_error(logits[False], logits[True]) < TOLERANCE


@pytest.mark.fast_cases(*tiny.fast(NAMES))
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_shared_prefix_continues_from_a_snapshot(name, shelf):
    rng = random.Random(5)
    model = shelf.model(name)
    target = shelf.target(name)
    target.cache.set_prefix_caching(True)
    common = tiny.text(rng, CHUNK + 9)
    first = admit(target, 0, common + tiny.text(rng, 20))
    assert first.num_cached_tokens == 0
    batch = tiny.everything([first])
    draft = tree.chain(torch.tensor([tiny.text(rng, 4)]), (4,))
    commit(target, batch, draft, target.score(batch, draft), [range(2)], [9])
    second = admit(target, 1, common + tiny.text(rng, 7))  # the prompts differ inside of a chunk
    assert second.num_cached_tokens == CHUNK
    assert relative_error(next_logits(target, [second])[0], expected_logits(model, second)) < TOLERANCE
    assert relative_error(next_logits(target, [first])[0], expected_logits(model, first)) < TOLERANCE
    target.cache.release(0)
    whole = len(first.token_ids) - 1  # the last token is not cached
    for slot in (2, 3):  # a state is copied, so it can be shared again
        third = admit(target, slot, first.token_ids + tiny.text(rng, 3))
        assert third.num_cached_tokens == whole
        assert relative_error(next_logits(target, [third])[0], expected_logits(model, third)) < TOLERANCE
    # The slot's own snapshot, before the end of its sequence.
    again = admit(target, 0, list(first.token_ids[: CHUNK + 30]))
    assert again.num_cached_tokens == CHUNK
    assert relative_error(next_logits(target, [again])[0], expected_logits(model, again)) < TOLERANCE
    target.cache.forget()
    assert admit(target, 3, [*common, 1]).num_cached_tokens == 0


@pytest.mark.parametrize("case", ["shared prefix", "reused slot", "pass without a commit"])
@torch.inference_mode()
def test_slot_keeps_no_snapshots_of_another_text(case, shelf):
    """The text behind a shared prefix, or of a reused slot, is another one at the positions of earlier snapshots."""
    rng = random.Random(6)
    model = shelf.model("bamba")
    target = make_target(shelf.checkpoint("bamba"), slots=3, context=256)
    target.cache.set_prefix_caching(True)
    common = tiny.text(rng, CHUNK + 9)
    first = admit(target, 0, common + tiny.text(rng, 2 * CHUNK))
    if case == "pass without a commit":
        target.score(tiny.everything([first]), tree.empty(1, target.device))
    else:
        accept(target, first, 0, rng)
    if case == "shared prefix":
        shared = CHUNK
        second = admit(target, 1, common + tiny.text(rng, 5))
    else:
        shared = 0
        second = admit(target, 0, tiny.text(rng, 5))
    assert second.num_cached_tokens == shared
    while len(second.token_ids) < 2 * CHUNK + 20:  # accepted draft tokens leave no snapshots
        accept(target, second, 15, rng)
    third = admit(target, 2, second.token_ids[: 2 * CHUNK + 9] + tiny.text(rng, 3))
    assert third.num_cached_tokens == shared
    assert relative_error(next_logits(target, [third])[0], expected_logits(model, third)) < TOLERANCE


@pytest.mark.parametrize("name", [*TWO_WAYS, "mamba", "lfm2"])
@torch.inference_mode()
def test_pass_without_a_commit_changes_no_state(name, shelf):
    rng = random.Random(12)
    model = shelf.model(name)
    target = shelf.target(name)
    seqs = [tiny.admit(target, slot, tiny.text(rng, 5 + slot)) for slot in range(2)]
    for length in (0, CHUNK + 20, 0):  # the feeds are staged, folded in chunks, and one token
        for seq in seqs:
            seq.token_ids += tiny.text(rng, length)
        batch = tiny.everything(seqs)
        target.score(batch, tree.chain(torch.randint(tiny.VOCAB, (2, 3)), (3, 3)))
        draft = tree.empty(2, target.device)
        scores = target.score(batch, draft)
        for seq, logits in zip(seqs, scores.logits[:, 0], strict=True):
            assert relative_error(logits, expected_logits(model, seq)) < TOLERANCE
        commit(target, batch, draft, scores, [(), ()], [3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["draft", "tree"])
@pytest.mark.parametrize("name", NAMES)
def test_as_draft_of_itself(name, proposer, shelf):
    check_draft_of_itself(shelf.folder(name), proposer)
