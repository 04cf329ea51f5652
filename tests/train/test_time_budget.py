"""Trainings with --max-minutes."""

import json
from functools import partial

import pytest

from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.train.budget import TimeBudget
from outrider.train.run import Training
from outrider.train.settings import Settings
from tests.helpers.configured import with_engine

HOUR = 60.0


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_time_counts_between_start_and_stop(clock):
    budget = TimeBudget(10.0, used=1.0, clock=clock)
    clock.now += 5
    assert budget.elapsed == 1.0
    budget.start()
    clock.now += 2
    assert (budget.elapsed, budget.share) == (3.0, 0.3)
    budget.stop()
    clock.now += 50
    assert budget.elapsed == 3.0
    budget.start()
    clock.now += 50
    assert (budget.elapsed, budget.share) == (53.0, 1.0)


def test_another_cycle_runs_only_if_it_ends_nearer_to_the_budget(clock):
    budget = TimeBudget(10.0, used=8.0, clock=clock)
    assert not budget.is_over(3.0)
    assert budget.is_over(5.0)
    assert TimeBudget(10.0, used=10.0, clock=clock).is_over(0.0)


def test_actions_are_due_at_intervals(clock):
    budget = TimeBudget(100.0, clock=clock)
    budget.start()
    assert not budget.is_due("save", 10.0)
    clock.now += 10
    assert budget.is_due("save", 10.0)
    assert not budget.is_due("save", 10.0)
    assert budget.is_due("evaluation", 10.0)
    clock.now += 10
    assert budget.is_due("save", 10.0)


@pytest.fixture
def settings(tmp_path):
    """Makes settings of a training that takes milliseconds per generation cycle."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"<|endoftext|>def f{i}" + "(x):\n"}) + "\n" for i in range(5)))

    def make(minutes, **other):
        small = {"batch_size": 2, "steps_per_generation": 2, "max_tokens": 8, "k": 2, "max_num_seqs": 4} | other
        return with_engine(
            Settings,
            out=str(tmp_path / "out"),
            data=[str(data)],
            target=str(embedded("nano")),
            proposer="none",
            max_minutes=minutes,
            **small,
        )

    return make


def test_training_ends_with_its_time_and_continues_with_more(settings, monkeypatch):
    """The clock is the number of generation cycles: each takes an hour."""
    cycles = []
    run = Training.run_cycle

    def counted(self):
        cycles.append(1)
        return run(self)

    monkeypatch.setattr(Training, "run_cycle", counted)
    monkeypatch.setattr("outrider.train.run.TimeBudget", partial(TimeBudget, clock=lambda: 3600.0 * len(cycles)))
    evaluations = []
    document, lines = Training("mtp", settings(3 * HOUR)).run(
        on_evaluation=lambda figures, done: evaluations.append((done, "temperature 0" in figures))
    )
    assert (document["cycles"], document["steps"], len(lines)) == (3, 6, 3)
    assert [done for done, _ in evaluations] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert all(measured for _, measured in evaluations)
    cycles.clear()
    document, _ = Training("mtp", settings(3 * HOUR)).run()  # it is finished
    assert (document["cycles"], len(cycles)) == (3, 0)
    document, lines = Training("mtp", settings(5 * HOUR)).run()
    assert (document["cycles"], len(cycles), [line["cycle"] for line in lines]) == (5, 2, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("minutes", "other"), [(0.0, {}), (-1.0, {}), (float("inf"), {}), (1.0, {"epochs": 2})])
def test_wrong_times_are_refused(minutes, other, settings):
    with pytest.raises(OutriderError, match="--max-minutes is"):
        settings(minutes, **other)


def test_several_processes_are_refused(settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OutriderError, match="works with one process"):
        Training("mtp", settings(1.0))
