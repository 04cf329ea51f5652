"""Tests of `Engine.recover`: only the sequence that causes an error ends with it."""

import itertools

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason, Request
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget
from outrider.testing.toy_target import ToyCache
from outrider.verify.rules import EXACT
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run
from tests.models.cache.test_replay import toy_prompts

COUNT, LIMIT, FAILING = 6, 24, 2
PROPOSER_NAMES = (
    "none",
    "ngram",
    "model",
    "text draft",
    "suffix",
    "recycle",
    "lookahead",
    "switch",
    "merge",
    "best",
    "tree",
)


class FailingTarget(ToyTarget):
    """Raises for one request after five output tokens or, with `for_drafts`, in every third pass with draft tokens."""

    def __init__(self, *, for_drafts: bool = False) -> None:
        super().__init__(spread=3.0)
        self.calls = itertools.count(1)
        self.for_drafts = for_drafts

    def score(self, batch, draft, first=-1):
        has_failing = any(seq.request.id == FAILING and seq.num_output_tokens >= 5 for seq in batch.seqs)
        if has_failing and not self.for_drafts:
            raise RuntimeError("injected failure")
        if self.for_drafts and draft.size and next(self.calls) % 3 == 0:
            raise RuntimeError("injected failure of a draft")
        return super().score(batch, draft, first)


def run_with_recovery(engine, params):
    """Run all requests. Return the sequences by request, and the number of rounds that raised."""
    for i, prompt in enumerate(toy_prompts(COUNT)):
        engine.add(
            Request(id=i, prompt_token_ids=tuple(prompt), params=params, seed=i, end_ids=frozenset(), max_tokens=LIMIT)
        )
    done = {}
    num_raised = 0
    while engine.busy():
        try:
            seqs = engine.step()
        except Exception as error:
            num_raised += 1
            seqs = engine.recover(error)
        done |= {seq.request.id: seq for seq in seqs if seq.finish_reason}
    return done, num_raised


@pytest.mark.fast_cases(
    "none-0.0",
    "ngram-0.8",
    "model-0.0",
    "text draft-0.8",
    "suffix-0.0",
    "recycle-0.8",
    "lookahead-0.0",
    "switch-0.8",
    "merge-0.0",
    "best-0.8",
    "tree-0.0",
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", PROPOSER_NAMES)
def test_only_the_failing_sequence_ends(name, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=LIMIT)
    plain, _ = run_with_recovery(make_engine(ToyTarget(spread=3.0), EVERY["none"], rows=4), params)
    engine = make_engine(FailingTarget(), EVERY[name], rows=4)
    done, num_raised = run_with_recovery(engine, params)
    assert sorted(done) == list(range(COUNT))
    assert num_raised == 1
    for i, seq in done.items():
        expected, actual = outputs([plain[i], seq])
        if i == FAILING:
            assert (seq.finish_reason, seq.error) == (FinishReason.ERROR, "the engine failed: injected failure")
            assert actual == expected[: len(actual)]
            assert len(actual) < LIMIT
        else:
            assert seq.finish_reason is FinishReason.LENGTH
            assert actual == expected
    assert sum(seq.num_output_tokens for seq in done.values()) == engine.stats.output_tokens


@pytest.mark.parametrize("name", PROPOSER_NAMES)
def test_round_that_fails_with_draft_tokens_runs_without_them(name):
    params = SamplingParams(temperature=0.8, max_tokens=LIMIT)
    plain, _ = run_with_recovery(make_engine(ToyTarget(spread=3.0), EVERY["none"], rows=4), params)
    done, num_raised = run_with_recovery(make_engine(FailingTarget(for_drafts=True), EVERY[name], rows=4), params)
    assert (num_raised > 0) == (name != "none")
    assert {i: outputs([seq]) for i, seq in done.items()} == {i: outputs([seq]) for i, seq in plain.items()}


def test_error_in_commit_ends_all_sequences_of_the_round(monkeypatch):
    engine = make_engine(ToyTarget(spread=3.0), NgramProposer, rows=4)
    commit = ToyCache.commit
    calls = itertools.count(1)

    def failing_commit(self, round):
        if next(calls) == 5:
            raise RuntimeError("injected failure")
        commit(self, round)

    monkeypatch.setattr(ToyCache, "commit", failing_commit)
    done, num_raised = run_with_recovery(engine, SamplingParams(max_tokens=LIMIT))
    reasons = [done[i].finish_reason for i in range(COUNT)]
    assert num_raised == 1
    assert reasons == [FinishReason.ERROR] * 4 + [FinishReason.LENGTH] * 2


def test_recover_raises_the_error_if_no_round_has_begun():
    with pytest.raises(RuntimeError, match="early"):
        make_engine(ToyTarget(), NgramProposer).recover(RuntimeError("early"))


@pytest.mark.parametrize("name", ["ngram", "model", "merge"])
def test_sequences_of_a_batch_with_different_verifiers(name):
    rules = [rule for rule in EXACT if name != "merge" or EXACT[rule].trees]
    params = [SamplingParams(temperature=0.9, seed=3, verifier=rule, max_tokens=LIMIT) for rule in rules]
    prompts = toy_prompts(len(rules))
    mixed = outputs(run(make_engine(ToyTarget(), EVERY[name]), prompts, params, limit=LIMIT))
    for i, rule in enumerate(rules):
        engine = make_engine(ToyTarget(), EVERY[name])
        same_rule = [SamplingParams(temperature=0.9, seed=3, verifier=rule, max_tokens=LIMIT)] * len(rules)
        uniform = outputs(run(engine, prompts, same_rule, limit=LIMIT))
        if rule in (
            "walk",
            "coupled",
        ):  # with other rules the output depends on the draft, which learns from all rounds
            assert mixed[i] == uniform[i], rule
    assert len({tuple(tokens) for tokens in mixed}) > 1
