"""Tests that all proposers, caches and verifiers pass the conformance suite, and that wrong ones fail."""

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.testing import ConformanceError, ToyTarget, check_cache, check_proposer, check_verifier
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT
from tests.helpers.conformance import CACHES, LEARNING, PROPOSERS


@pytest.mark.fast_cases("none", "model", "cascade", "text draft", "short model")
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposer(name):
    check_proposer(PROPOSERS[name], trials=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_proposer_that_learns(name):
    check_proposer(LEARNING[name], learns=True)


@pytest.mark.fast_cases("toy", "paged and tight")
@pytest.mark.parametrize("name", CACHES)
def test_cache(name):
    check_cache(CACHES[name], trials=4)


@pytest.mark.parametrize("name", EXACT)
def test_verifier(name):
    check_verifier(EXACT[name], trials=1)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_verifiers_fail(name):
    with pytest.raises(ConformanceError, match=name):
        check_verifier(LOSSY[name])


class Stateless(NgramProposer):
    """Resets its acceptance estimate, so that drafts depend on the committed tokens only."""

    def commit(self, round):
        super().commit(round)
        self._acceptance = AcceptanceEstimator()


class RepeatsBonusToken(Stateless):
    """Appends the bonus token to its index a second time."""

    def commit(self, round):
        super().commit(round)
        for seq, tokens in zip(round.batch.seqs, round.emitted, strict=True):
            for token in tokens[-1:]:
                self.indexes[seq.slot].append(token)


class KeepsEarlierSequence(Stateless):
    """Keeps the tokens of the earlier sequence of a slot."""

    def admit(self, slot, request):
        if slot not in self.indexes:
            super().admit(slot, request)

    def release(self, slot):
        pass


class ExceedsBudget(Stateless):
    """Drafts one token more than its budget."""

    def propose(self, batch):
        return super().propose(batch.limited(tuple(budget + 1 if budget else 0 for budget in batch.draft_budget)))


class CountsCalls(DraftModelProposer):
    """Changes its draft with the number of calls."""

    calls = 0

    def propose(self, batch):
        self.calls += 1
        draft = super().propose(batch)
        return replace(draft, tokens=(draft.tokens + self.calls) % self._setup.vocab)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (RepeatsBonusToken, "how the tokens were committed|earlier sequence of the slot"),
        (KeepsEarlierSequence, "earlier sequence of the slot"),
        (ExceedsBudget, "exceeds batch.draft_budget"),
        (
            lambda setup: CountsCalls(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots)),
            "how the tokens|must be above 0 for its token",
        ),
    ],
)
def test_wrong_proposers_fail(make, message):
    with pytest.raises(ConformanceError, match=message):
        check_proposer(make)


def test_proposer_without_their_mistakes_passes():
    check_proposer(Stateless)


class LosesLastToken(ToyTarget):
    """Loses the last accepted draft token if the path of a tree has gaps."""

    def __init__(self):
        super().__init__()
        commit = self.cache.commit

        def wrong_commit(round):
            commit(round)
            for seq, path in zip(round.batch.seqs, round.path, strict=True):
                if path and path != tuple(range(len(path))):
                    self.cache.text[seq.slot][-1] = 0

        self.cache.commit = wrong_commit


def test_wrong_cache_fails():
    with pytest.raises(ConformanceError, match="fresh prefill"):
        check_cache(LosesLastToken)


def test_joint_distribution_of_the_toy_target():
    from outrider.core.params import SamplingParams
    from outrider.testing import joint_distribution

    target = ToyTarget(vocab=4)
    joint = joint_distribution(target, [1, 2], SamplingParams(temperature=1.0), 3)
    first = target.table[1, 2].softmax(-1)
    second = target.table[2, 3].softmax(-1)
    third = target.table[3, 0].softmax(-1)
    assert joint.shape == (4, 4, 4)
    torch.testing.assert_close(joint[3, 0, 1].item(), (first[3] * second[0] * third[1]).item())
    assert tree.empty(1, target.device).size == 0
