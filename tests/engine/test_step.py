"""Tests of `Engine.step` and of `drive`: rounds, admission, commit, the end of sequences, and what can go wrong."""

from dataclasses import replace

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.types import FinishReason, Request
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.engine.drive import drive
from outrider.errors import NotEnoughMemory, OutriderError
from outrider.testing import ToyTarget
from tests.helpers.engines import make_engine, outputs, run, tightened

GREEDY = SamplingParams()
PROMPTS = [[1, 2, 1, 2, 1], [3, 4, 3, 4]]


def request(id=0, prompt=(1, 2, 1, 2, 1), limit=5, **options):
    options = {"params": GREEDY, "end_ids": frozenset(), **options}
    return Request(id=id, prompt_token_ids=tuple(prompt), seed=id, max_tokens=limit, **options)


def plain(prompts=PROMPTS, **target):
    return outputs(run(make_engine(ToyTarget(**target), NoProposer), prompts, GREEDY, limit=12, ends=frozenset()))


class Calls:
    """Notes the calls of some methods, in order."""

    def __init__(self, monkeypatch):
        self.names = []
        self._patch = monkeypatch

    def watch(self, part, *names):
        for name in names:
            method = getattr(part, name)
            self._patch.setattr(
                part, name, lambda *args, _method=method, _name=name: self.names.append(_name) or _method(*args)
            )


def watched(monkeypatch, target):
    calls = Calls(monkeypatch)
    calls.watch(target, "score")
    calls.watch(target.cache, "admit", "commit", "release")

    def make(setup):
        proposer = NgramProposer(setup)
        calls.watch(proposer, "admit", "propose", "commit", "release")
        return proposer

    return make_engine(target, make), calls.names


def test_a_round_admits_proposes_scores_and_commits(monkeypatch):
    engine, calls = watched(monkeypatch, ToyTarget())
    seq = engine.add(request(limit=2))
    assert engine.step() == (seq,)
    assert calls == ["admit", "admit", "propose", "score", "commit", "commit"]
    calls.clear()
    assert engine.step() == (seq,)
    assert calls == ["propose", "score", "commit", "commit", "release", "release"]
    assert seq.finish_reason is FinishReason.LENGTH
    assert engine.step() == ()
    assert engine.stats.rounds == 2


def test_a_round_that_fails_with_draft_tokens_runs_again_without_them():
    class FragileTarget(ToyTarget):
        def score(self, batch, draft, first=-1):
            scores = super().score(batch, draft, first)
            return replace(scores, logits=scores.logits * torch.nan) if draft.size else scores

    seqs = run(make_engine(FragileTarget(), NgramProposer), PROMPTS, GREEDY, limit=12, ends=frozenset())
    assert outputs(seqs) == plain()
    assert all(not seq.num_draft_tokens for seq in seqs)


def test_logits_that_are_never_finite_end_the_sequence():
    class BrokenTarget(ToyTarget):
        def score(self, batch, draft, first=-1):
            scores = super().score(batch, draft, first)
            return replace(scores, logits=scores.logits * torch.nan)

    (seq,) = run(make_engine(BrokenTarget(), NoProposer), PROMPTS[:1], GREEDY, limit=12)
    assert seq.finish_reason is FinishReason.ERROR
    assert seq.error == "the target's logits were not finite (NaN or infinite); try another dtype"


def test_out_of_memory_names_the_fix_and_ends_the_sequences(monkeypatch):
    target = ToyTarget()
    engine = make_engine(target, NoProposer)
    seqs = [engine.add(request(id)) for id in range(2)]

    def score(*args):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(target, "score", score)
    with pytest.raises(NotEnoughMemory, match="max_num_seqs") as raised:
        engine.step()
    assert engine.recover(raised.value) == tuple(seqs)
    assert all(seq.finish_reason is FinishReason.ERROR and "max_num_seqs" in seq.error for seq in seqs)
    assert not engine.busy()


def test_a_sequence_that_runs_alone_has_no_draft_tokens_and_no_plan(monkeypatch):
    target = ToyTarget()
    engine, calls = watched(monkeypatch, target)
    seq = engine.add(request())
    score = target.score
    monkeypatch.setattr(target, "score", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        engine.step()
    monkeypatch.setattr(target, "score", score)
    calls.clear()
    assert engine.recover(raised.value) == (seq,)
    assert calls == ["propose", "score", "commit", "commit"]
    assert seq.rounds == [(0, 0, 1)]
    assert engine.stats.rounds == 1


def test_a_draft_over_its_budget_is_an_error():
    class Excessive(NoProposer):
        def propose(self, batch):
            draft = super().propose(batch)
            return replace(draft, width=(9,) * len(batch.seqs))

    engine = make_engine(ToyTarget(), Excessive)
    engine.add(request())
    with pytest.raises(OutriderError, match="but the budget is"):
        engine.step()


def test_draft_tokens_that_do_not_fit_are_dropped_and_nothing_is_preempted():
    engine = make_engine(tightened(ToyTarget(), sum(map(len, PROMPTS)) + 26), NgramProposer)
    seqs = run(engine, PROMPTS, GREEDY, limit=12, ends=frozenset())
    assert outputs(seqs) == plain()
    assert engine.cache_usage().preempted == 0


@pytest.mark.parametrize(
    ("options", "reason"), [({}, FinishReason.LENGTH), ({"end_ids": frozenset(range(8))}, FinishReason.STOP)]
)
def test_why_a_sequence_ends(options, reason):
    engine = make_engine(ToyTarget(), NgramProposer)
    seq = engine.add(request(**options))
    for _ in drive(engine, [seq]):
        pass
    assert seq.finish_reason is reason
    assert seq.num_output_tokens == (5 if reason is FinishReason.LENGTH else 1)


def test_a_blocked_engine_says_why():
    engine = make_engine(ToyTarget(), NoProposer)
    seq = engine.add(request())
    engine.block("the engine sleeps; wake it")
    with pytest.raises(OutriderError, match="the engine sleeps"):
        engine.step()
    engine.block("")
    assert engine.step() == (seq,)


def test_drive_takes_sequences_that_are_added_in_the_loop():
    engine = make_engine(ToyTarget(), NoProposer)
    seqs = [engine.add(request(0, limit=2))]
    for _ in drive(engine, seqs):
        if len(seqs) < 3 and seqs[-1].finish_reason:
            seqs.append(engine.add(request(len(seqs), limit=2)))
    assert [seq.finish_reason for seq in seqs] == [FinishReason.LENGTH] * 3


def test_leaving_drive_aborts_its_own_sequences_only():
    engine = make_engine(ToyTarget(), NoProposer)
    other = engine.add(request(0))
    seqs = [engine.add(request(id, limit=id)) for id in (1, 5)]
    for _ in drive(engine, seqs):
        break
    assert [seq.finish_reason for seq in seqs] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert other.finish_reason is None
    assert engine.busy()
