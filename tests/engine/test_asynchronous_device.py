"""On a device that runs behind the host, the parts of a round take the time of their work, not of its launch.

The times are those of a Llama 3 8B with a draft like its 1B on an H100: 6.89 ms for a pass of the target, 1.85 ms for a
draft token, and 0.27 ms for the host.
"""

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Request
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.engine import verification
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.engine.stopwatch import CudaStopwatch, HostStopwatch, find_stopwatch
from outrider.verify.rules import EXACT
from tests.helpers.async_device import AsyncDevice, AsyncDraftModel, AsyncTarget, EventStopwatch, LaunchStopwatch

MS = 1e-3
STEP = 1.85 * MS
HOST = 0.27 * MS
TARGET = PassCost(tokens=(1, 5, 9, 17), seconds=(6.89 * MS, 7.33 * MS, 7.77 * MS, 8.65 * MS), entry=0.0, pair=0.0)
DRAFT = PassCost(tokens=(1, 8), seconds=(STEP, STEP), entry=0.0, pair=0.0)
COSTS = CostModel(target=TARGET, draft=DRAFT, host=HOST)
CONTEXT = 4096


class AlwaysFour(CostPlanner):
    """Learns as the planner of k auto does, from rounds with 4 draft tokens."""

    def _choose_alternative(self, batch, load):
        return 0

    def _draft_length(self, alternative, load):
        return 4


def run(planner, stopwatch_class, monkeypatch, *, acceptance=0.82, rounds=300):
    """Return the engine after some rounds of one sequence."""
    device = AsyncDevice(launch=0.03 * MS)
    target = AsyncTarget(device, TARGET.base, vocab=64, context=CONTEXT, slots=1)
    setup = ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=1,
        context=CONTEXT,
        device=torch.device("cpu"),
        dtype=None,
        draw=EXACT["walk"].draw,
        tokenizer=None,
    )
    engine = Engine(
        target=target,
        proposer=AsyncDraftModel(setup, device, step=STEP, acceptance=acceptance),
        verifier=EXACT["walk"],
        planner=planner,
        scheduler=Scheduler(slots=1, chunk=512, context=CONTEXT),
        stopwatch=stopwatch_class(device),
    )
    read_greedy = verification.read_greedy

    def read(*args):
        device.read()
        device.host += HOST
        return read_greedy(*args)

    monkeypatch.setattr(verification, "read_greedy", read)
    request = Request(
        id=0, prompt_token_ids=(1, 2, 3), params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=CONTEXT
    )
    engine.add(request)
    for _ in range(rounds):
        engine.step()
    return engine


@pytest.mark.parametrize(
    ("stopwatch", "verify", "extra", "gain"),
    # The host alone sees launches. The draft then counts twice: calibrated, and as a part of the target's round.
    [(LaunchStopwatch, 14.7, 6.8, 1.22), (EventStopwatch, 7.6, 0.0, 1.67)],
)
def test_planner_learns_the_time_of_each_part(stopwatch, verify, extra, gain, monkeypatch):
    planner = AlwaysFour(COSTS)
    run(planner, stopwatch, monkeypatch, rounds=400)
    clock, proposer = planner._clock, planner.proposers[0]
    cached = planner._window.load.cached
    assert clock.verify(1, 4, cached=cached) / MS == pytest.approx(verify, rel=0.02)
    assert clock.extra / MS == pytest.approx(extra, abs=0.2)
    assert proposer.best_length(1, cached, clock)[1] == pytest.approx(gain, abs=0.04)


def test_parts_of_a_round_add_up_to_it(monkeypatch):
    engine = run(AlwaysFour(COSTS), EventStopwatch, monkeypatch)
    stats = engine.stats.as_dict()
    assert stats["draft_ms"] == pytest.approx(4 * 1.85, rel=0.01)
    assert stats["target_ms"] == pytest.approx(7.33, rel=0.01)
    assert stats["host_ms"] == pytest.approx(0.27, rel=0.01)
    assert engine.stats.seconds == pytest.approx(engine._stopwatch.now())


def test_auto_speculates_where_it_gains(monkeypatch):
    """With 65% of the draft tokens accepted, 2 of them gain 1.3. The host's times would say that they lose."""
    engine = run(CostPlanner(COSTS), EventStopwatch, monkeypatch, acceptance=0.65, rounds=400)
    plain_seconds = engine.stats.output_tokens * (6.89 * MS + HOST)
    assert plain_seconds / engine.stats.seconds > 1.2


def test_times_of_a_round_follow_the_device(monkeypatch):
    seen = []
    engine = run(AlwaysFour(COSTS), EventStopwatch, monkeypatch, rounds=3)
    engine.on_times = lambda seqs, times: seen.append(times)
    engine.step()
    (times,) = seen
    assert times.drafted - times.began == pytest.approx(4 * 1.85 * MS, rel=0.02)
    assert times.verified - times.drafted == pytest.approx(7.33 * MS + HOST, rel=0.02)


def test_sequence_that_runs_alone_is_measured(monkeypatch):
    planner = AlwaysFour(COSTS)
    engine = run(planner, EventStopwatch, monkeypatch, rounds=3)
    before = engine.stats
    monkeypatch.setattr(planner, "trim", lambda batch, draft: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.recover(ZeroDivisionError())
    assert engine.stats.target_seconds - before.target_seconds == pytest.approx(6.89 * MS, rel=0.01)
    assert engine.stats.draft_seconds == before.draft_seconds


class _Event:
    """A CUDA event that notes the order of calls."""

    def __init__(self, enable_timing):
        assert enable_timing
        self.calls = []

    def record(self, stream):
        self.calls.append(("record", stream))

    def synchronize(self):
        self.calls.append(("synchronize",))

    def elapsed_time(self, end):
        assert end.calls == [("record", "stream of cuda:1"), ("synchronize",)]
        return 7.5  # milliseconds


def test_stopwatch_of_a_gpu_uses_events_of_its_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    stopwatch = find_stopwatch(torch.device("cuda:1"))
    assert isinstance(stopwatch, CudaStopwatch)
    assert stopwatch.seconds(stopwatch.mark(), stopwatch.mark()) == 7.5e-3
    assert isinstance(find_stopwatch(torch.device("cpu")), HostStopwatch)
