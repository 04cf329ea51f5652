"""Each proposer and each cache keeps the law of its protocol; and the suite notices those who do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing import ConformanceError, ToyTarget, check_cache, check_proposer, check_verifier
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT
from tests.helpers.conformance import CACHES, LEARNING, PROPOSERS


@pytest.mark.parametrize("name", PROPOSERS)
def test_proposer(name):
    check_proposer(PROPOSERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_proposer_that_learns(name):
    check_proposer(LEARNING[name], learns=True)


@pytest.mark.parametrize("name", CACHES)
def test_cache(name):
    check_cache(CACHES[name])


@pytest.mark.parametrize("name", EXACT)
def test_verifier(name):
    check_verifier(EXACT[name], trials=1)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_verifiers_are_noticed(name):
    with pytest.raises(ConformanceError, match=name):
        check_verifier(LOSSY[name])


class Steady(NgramProposer):
    """Forgets how good its guesses were, and so depends on nothing but the text."""

    def commit(self, round):
        super().commit(round)
        self._chances = AcceptanceEstimator()


class Forgetful(Steady):
    """Takes what the target added itself for what came next, whatever was kept before it."""

    def commit(self, round):
        super().commit(round)
        for row, tokens in zip(round.batch.seqs, round.emitted, strict=True):
            for token in tokens[-1:]:
                self._indexes[row.slot].append(token)


class Leaky(Steady):
    """Keeps the text of who had the slot before."""

    def admit(self, slot, request):
        if slot not in self._indexes:
            super().admit(slot, request)

    def release(self, slot):
        pass


class Greedy(Steady):
    """Takes more than it was given."""

    def propose(self, batch):
        return super().propose(replace(batch, draft_budget=tuple(b + 1 if b else 0 for b in batch.draft_budget)))


class Stateful(DraftModelProposer):
    """Guesses by a counter of its own."""

    calls = 0

    def propose(self, batch):
        self.calls += 1
        draft = super().propose(batch)
        return replace(draft, tokens=(draft.tokens + self.calls) % self._setup.vocab)


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (Forgetful, "how the text came about|who had the slot"),
        (Leaky, "who had the slot"),
        (Greedy, "overspends"),
        (lambda setup: Stateful(setup, ToyTarget(vocab=setup.vocab, slots=setup.slots)), "how the text|some mass"),
    ],
)
def test_broken_proposers_are_noticed(make, law):
    check_proposer(Steady)
    with pytest.raises(ConformanceError, match=law):
        check_proposer(make)


class Off(ToyTarget):
    """Loses the last accepted guess whenever a tree's path has gaps."""

    def __init__(self):
        super().__init__()
        commit = self.cache.commit

        def wrong(round):
            commit(round)
            for row, path in zip(round.batch.seqs, round.path, strict=True):
                if path and path != tuple(range(len(path))):
                    self.cache.text[row.slot][-1] = 0

        self.cache.commit = wrong


def test_broken_cache_is_noticed():
    with pytest.raises(ConformanceError, match="fresh prefill"):
        check_cache(Off)


def test_toy_law_is_its_table():
    from outrider.core.params import SamplingParams
    from outrider.testing import joint_distribution

    target = ToyTarget(vocab=4)
    law = joint_distribution(target, [1, 2], SamplingParams(temperature=1.0), 3)
    first, second = target.table[1, 2].softmax(-1), target.table[2, 3].softmax(-1)
    third = target.table[3, 0].softmax(-1)
    assert law.shape == (4, 4, 4)
    torch.testing.assert_close(law[3, 0, 1].item(), (first[3] * second[0] * third[1]).item())
    assert tree.empty(1, target.device).size == 0
