"""Tests of chains of a draft model: catching up, staying within the budget, and the cache of the draft model."""

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Draw
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.testing import ToyTarget, toy_setup
from tests.drafting.propose.toy_rounds import admit, batch_of, commit, verify
from tests.helpers.engines import make_engine, run

PROMPTS = [[1, 2, 3], [4, 5], [2, 2, 2, 1]]


def proposer_of(target, model=None, draw=Draw.SAMPLE):
    model = model or ToyTarget(seed=99)
    return DraftModelProposer(toy_setup(target, draw=draw), model), model


def test_each_sequence_has_a_chain_within_its_budget():
    proposer, _ = proposer_of(ToyTarget())
    seqs = admit(proposer, PROMPTS)
    draft = proposer.propose(batch_of(seqs, 4).limited((4, 0, 2)))
    assert draft.chain
    assert draft.width == (4, 0, 2)
    assert draft.q is None  # greedy requests


def test_the_target_itself_as_draft_is_always_right():
    target = ToyTarget()
    proposer, _ = proposer_of(target, ToyTarget())
    seqs = admit(proposer, PROMPTS)
    for _ in range(5):
        batch = batch_of(seqs, 3)
        round = verify(target, batch, proposer.propose(batch))
        assert [len(tokens) for tokens in round.emitted] == [4, 4, 4]
        commit(proposer, round)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5},
        {"top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"logit_bias": {3: 1.0}, "min_tokens": 50, "frequency_penalty": -0.5, "top_k": 4},
    ],
    ids=["penalties", "filters", "both"],
)
def test_the_target_as_draft_is_always_right_with_sampling_parameters(params):
    """The distribution q of a draft token follows p, so rejection sampling accepts all of them."""
    engine = make_engine(ToyTarget(), lambda setup: DraftModelProposer(setup, ToyTarget()), verifier="rejection")
    (seq,) = run(engine, [[1, 2, 3]], SamplingParams(temperature=0.8, **params), limit=60, ends=frozenset({5}))
    drafted, accepted, _ = zip(*seq.rounds, strict=True)
    assert sum(accepted) == sum(drafted) > 0


def test_the_cache_holds_what_was_committed_but_not_the_last_draft_token():
    target = ToyTarget()
    proposer, model = proposer_of(target)
    seqs = admit(proposer, PROMPTS)
    for _ in range(4):
        batch = batch_of(seqs, 3)
        round = verify(target, batch, proposer.propose(batch))
        ends = [len(seq.token_ids) + min(len(path), 2) for seq, path in zip(seqs, round.path, strict=True)]
        commit(proposer, round)
        assert [model.cache.length(seq.slot) for seq in seqs] == ends


def test_nothing_is_fed_before_the_first_draft():
    proposer, model = proposer_of(ToyTarget())
    seqs = admit(proposer, PROMPTS)
    assert proposer.propose(batch_of(seqs, 0)).width == (0, 0, 0)
    assert [model.cache.length(seq.slot) for seq in seqs] == [0, 0, 0]


def test_a_long_prompt_is_prefilled_over_several_rounds_after_the_first_token():
    target = ToyTarget(context=2048)
    proposer, model = proposer_of(target, ToyTarget(seed=99, context=2048))
    seqs = admit(proposer, [[1, 2] * 450, [3, 4]])
    for cached in (0, 512):
        batch = batch_of(seqs, 2)
        draft = proposer.propose(batch)
        assert (draft.width, draft.num_prefilling) == ((0, 2), 1)
        commit(proposer, verify(target, batch, draft))
        assert model.cache.length(0) == cached
    assert proposer.propose(batch_of(seqs, 2)).width == (2, 2)


def test_a_full_context_of_the_draft_model_ends_drafting(caplog):
    proposer, _ = proposer_of(ToyTarget(), ToyTarget(seed=99, context=6))
    seqs = admit(proposer, [[1, 2, 3, 4], [1] * 7])
    assert proposer.propose(batch_of(seqs, 4)).width == (2, 0)
    assert "context of 6 tokens is full" in caplog.text


@pytest.mark.parametrize("draw", [Draw.ARGMAX, Draw.SAMPLE])
def test_a_released_slot_begins_anew(draw):
    proposer, model = proposer_of(ToyTarget(), draw=draw)
    seqs = admit(proposer, PROMPTS[:1])
    first = proposer.propose(batch_of(seqs, 3)).tokens
    proposer.release(0)
    assert not model.cache.length(0)
    assert proposer.propose(batch_of(admit(proposer, PROMPTS[:1]), 3)).tokens.tolist() == first.tolist()
