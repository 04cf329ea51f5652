"""A proposer that raises costs its guesses, and nothing else."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Needs
from outrider.errors import OutriderError
from outrider.propose.combine import Switch
from outrider.propose.isolate import IsolatedProposer, isolate
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget
from tests.cache.test_replay import toy_prompts
from tests.engine.test_recover import SOME
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run

LIMIT = 60


class Flaky:
    """Another proposer that raises now and then, before or after it has done what it was asked."""

    def __init__(self, inner, *, chance=0.0, seed=0, calls=("admit", "propose", "commit", "release"), until=10**9):
        self.inner, self.needs, self.asked = inner, inner.needs, 0
        self._chance, self._random, self._calls, self._until = chance, random.Random(seed), calls, until

    def _ask(self, name, *given):
        self.asked += 1
        fails = name in self._calls and self.asked < self._until and self._random.random() < self._chance
        if fails and self._random.random() < 0.5:
            raise RuntimeError(f"{name}, before")
        found = getattr(self.inner, name)(*given)
        if fails:
            raise RuntimeError(f"{name}, after")
        return found

    def admit(self, slot, request):
        self._ask("admit", slot, request)

    def propose(self, batch):
        return self._ask("propose", batch)

    def commit(self, round):
        self._ask("commit", round)

    def release(self, slot):
        self._ask("release", slot)


def life(make, *, count=8, temperature=0.8):
    engine = make_engine(ToyTarget(spread=3.0), make, rows=3)
    params = SamplingParams(temperature=temperature, seed=1)
    return engine, outputs(run(engine, toy_prompts(count), params, limit=LIMIT, ends=frozenset()))


@pytest.mark.parametrize("name", SOME)
def test_the_text_stays_whatever_is_raised(name, caplog):
    _, plain = life(EVERY["none"])
    for seed in range(3):
        guards = []

        def make(setup, seed=seed, guards=guards):
            guards.append(IsolatedProposer(Flaky(EVERY[name](setup), chance=0.1, seed=seed), setup, name=name))
            return guards[0]

        caplog.clear()
        with caplog.at_level(logging.WARNING, "outrider"):
            assert life(make)[1] == plain
        assert guards[0].failures > 3
        told = [record for record in caplog.records if "failed; its rows" in record.message]
        assert len(told) == 1
        assert told[0].exc_info


@pytest.mark.parametrize("name", ["ngram", "model", "suffix", "recycle"])
def test_once_it_is_sound_again_it_guesses_as_before(name):
    engine, _ = life(EVERY[name])
    guards = []

    def make(setup):
        guards.append(
            IsolatedProposer(Flaky(EVERY[name](setup), chance=1.0, calls=("commit",), until=12), setup, name=name)
        )
        return guards[0]

    other, _ = life(make)
    assert 0 < guards[0].failures < 6
    assert other.stats.draft_tokens > 0.5 * engine.stats.draft_tokens
    assert sum(other.stats.accepted) > 0.5 * sum(engine.stats.accepted)


def test_it_stays_off_a_while_and_ever_longer():
    made = []

    def make(setup):
        made.append(Flaky(EVERY["ngram"](setup), chance=1.0, calls=("propose",)))
        made.append(IsolatedProposer(made[0], setup, name="ngram"))
        return made[1]

    engine, _ = life(make, count=16)
    guard = made[1]
    assert guard.disabled
    assert engine.stats.draft_tokens == 0
    assert engine.stats.rounds > 200
    assert guard.failures < 8


def test_what_a_proposer_read_of_the_target_is_lost_to_the_rows_under_way():
    budgets = []

    class Reader(NgramProposer):
        needs = Needs(layers=(0,))

        def propose(self, batch):
            budgets.append({row.request.id: most for row, most in zip(batch.seqs, batch.draft_budget, strict=True)})
            if len(budgets) == 4:
                raise RuntimeError("lost")
            return super().propose(batch)

    life(lambda setup: IsolatedProposer(Reader(setup), setup, name="reader"), count=5)
    lost = set(budgets[3])
    assert all(most == 0 for budget in budgets[4:] for id, most in budget.items() if id in lost)
    assert any(most for budget in budgets[4:] for id, most in budget.items() if id not in lost)


def test_each_part_of_a_switch_has_a_guard_of_its_own():
    guards = []

    def make(setup):
        parts = [Flaky(NgramProposer(setup), chance=1.0), NgramProposer(setup)]
        found, own = isolate(Switch(setup, parts), setup, names=("bad", "good"))
        guards.extend(own)
        return found

    life(make)
    assert [bool(guard.failures) for guard in guards] == [True, False]


def test_too_many_guesses_are_a_failure_too():
    class Greedy(NgramProposer):
        def propose(self, batch):
            return super().propose(replace(batch, draft_budget=tuple(most + 3 for most in batch.draft_budget)))

    guards = []

    def make(setup):
        guards.append(IsolatedProposer(Greedy(setup), setup, name="greedy"))
        return guards[0]

    assert life(make)[1] == life(EVERY["none"])[1]
    assert guards[0].failures
    with pytest.raises(OutriderError, match="keep to"):
        life(Greedy)
