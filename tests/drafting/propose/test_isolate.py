"""The guard around a proposer: exceptions cost draft tokens and nothing else."""

import logging
import random

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Needs
from outrider.drafting.propose.combine import Switch
from outrider.drafting.propose.isolate import IsolatedProposer, isolate
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.errors import OutriderError
from outrider.testing import ToyTarget
from tests.engine.test_recover import PROPOSER_NAMES
from tests.helpers.conformance import EVERY
from tests.helpers.engines import make_engine, outputs, run
from tests.models.cache.test_replay import toy_prompts

LIMIT = 60


class FlakyProposer:
    """A proposer whose calls raise with a probability, before or after the inner proposer is called."""

    def __init__(
        self, inner, *, failure_rate=0.0, seed=0, calls=("admit", "propose", "commit", "release"), until=10**9
    ):
        self.inner = inner
        self.needs = inner.needs
        self.num_calls = 0
        self._failure_rate = failure_rate
        self._rng = random.Random(seed)
        self._calls = calls
        self._until = until

    def _call(self, name, *args):
        self.num_calls += 1
        fails = name in self._calls and self.num_calls < self._until and self._rng.random() < self._failure_rate
        if fails and self._rng.random() < 0.5:
            raise RuntimeError(f"{name}, before")
        result = getattr(self.inner, name)(*args)
        if fails:
            raise RuntimeError(f"{name}, after")
        return result

    def admit(self, slot, request):
        self._call("admit", slot, request)

    def propose(self, batch):
        return self._call("propose", batch)

    def commit(self, round):
        self._call("commit", round)

    def release(self, slot):
        self._call("release", slot)


def run_engine(make, *, count=8, temperature=0.8):
    """Return the engine and the outputs of some prompts."""
    engine = make_engine(ToyTarget(spread=3.0), make, rows=3)
    params = SamplingParams(temperature=temperature, seed=1)
    return engine, outputs(run(engine, toy_prompts(count), params, limit=LIMIT, ends=frozenset()))


@pytest.mark.fast_cases("text draft", "best")
@pytest.mark.parametrize("name", PROPOSER_NAMES)
def test_exceptions_do_not_change_the_output(name, caplog):
    _, plain = run_engine(EVERY["none"])
    for seed in range(3):
        guards = []

        def make(setup, seed=seed, guards=guards):
            guards.append(
                IsolatedProposer(FlakyProposer(EVERY[name](setup), failure_rate=0.1, seed=seed), setup, name=name)
            )
            return guards[0]

        caplog.clear()
        with caplog.at_level(logging.WARNING, "outrider"):
            assert run_engine(make)[1] == plain
        assert guards[0].failures > 3
        records = [record for record in caplog.records if "failed; its sequences" in record.message]
        assert len(records) == 1
        assert records[0].exc_info


@pytest.mark.fast_cases("ngram", "suffix")
@pytest.mark.parametrize("name", ["ngram", "model", "suffix", "recycle"])
def test_proposer_drafts_again_after_failures_end(name):
    engine, _ = run_engine(EVERY[name])
    guards = []

    def make(setup):
        flaky = FlakyProposer(EVERY[name](setup), failure_rate=1.0, calls=("commit",), until=12)
        guards.append(IsolatedProposer(flaky, setup, name=name))
        return guards[0]

    flaky_engine, _ = run_engine(make)
    assert 0 < guards[0].failures < 6
    assert flaky_engine.stats.draft_tokens > 0.5 * engine.stats.draft_tokens
    assert sum(flaky_engine.stats.accepted) > 0.5 * sum(engine.stats.accepted)


def test_pauses_grow_while_failures_continue():
    guards = []

    def make(setup):
        flaky = FlakyProposer(EVERY["ngram"](setup), failure_rate=1.0, calls=("propose",))
        guards.append(IsolatedProposer(flaky, setup, name="ngram"))
        return guards[0]

    engine, _ = run_engine(make, count=16)
    assert guards[0].disabled
    assert engine.stats.draft_tokens == 0
    assert engine.stats.rounds > 200
    assert guards[0].failures < 8


def test_running_sequences_are_excluded_if_hidden_states_are_lost():
    budgets = []

    class HiddenStateProposer(NgramProposer):
        needs = Needs(layers=(0,))

        def propose(self, batch):
            pairs = zip(batch.seqs, batch.draft_budget, strict=True)
            budgets.append({seq.request.id: budget for seq, budget in pairs})
            if len(budgets) == 4:
                raise RuntimeError("lost")
            return super().propose(batch)

    run_engine(lambda setup: IsolatedProposer(HiddenStateProposer(setup), setup, name="reader"), count=5)
    excluded = set(budgets[3])
    later = [(id, budget) for round_budgets in budgets[4:] for id, budget in round_budgets.items()]
    assert all(budget == 0 for id, budget in later if id in excluded)
    assert any(budget for id, budget in later if id not in excluded)


def test_each_part_of_a_switch_has_its_own_guard():
    guards = []

    def make(setup):
        parts = [FlakyProposer(NgramProposer(setup), failure_rate=1.0), NgramProposer(setup)]
        isolated, part_guards = isolate(Switch(setup, parts), setup, names=("bad", "good"))
        guards.extend(part_guards)
        return isolated

    run_engine(make)
    assert [bool(guard.failures) for guard in guards] == [True, False]


def test_too_many_draft_tokens_count_as_a_failure():
    class OverBudgetProposer(NgramProposer):
        def propose(self, batch):
            return super().propose(batch.limited(tuple(budget + 3 for budget in batch.draft_budget)))

    guards = []

    def make(setup):
        guards.append(IsolatedProposer(OverBudgetProposer(setup), setup, name="greedy"))
        return guards[0]

    assert run_engine(make)[1] == run_engine(EVERY["none"])[1]
    assert guards[0].failures
    with pytest.raises(OutriderError, match="return at most"):
        run_engine(OverBudgetProposer)
