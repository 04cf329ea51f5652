"""Turns trials into the figures of a table: quality and speed as shares of target-only's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from outrider.media.evaluation.bootstrap import Interval, ratio_interval
from outrider.media.evaluation.trials import Trial
from outrider.media.results import Seconds
from outrider.runtime.grouping import group_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The speed of a router as a multiple of target-only's, over rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a router."""

    router: str
    score: float
    quality: Interval  # score as a share of target-only's
    held_out: Interval  # the same of the held-out scorer
    distance: float
    speedup: Speedup
    ms: float  # of an output, the mean
    target_share: float  # blocks that the target made
    accepted_share: float | None  # drafts that were accepted
    failures: int
    overhead: float | None  # decoding and scoring a draft, as a share of the time in which the target makes a block

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON holds them."""
        return asdict(self)


def summarize(trials: Sequence[Trial], *, reference: str, seed: int = 0) -> list[Summary]:
    """Return the figures of all routers, in the order of the trials.

    Args:
        trials: of all routers over the same prompts and rounds.
        reference: the name of target-only.
        seed: of the bootstrap.
    """
    by_name = group_by(trials, lambda trial: trial.router)
    return [_summarize(group, by_name[reference], seed) for group in by_name.values()]


def best_gate(gates: Sequence[Summary], quality: float) -> int:
    """Return the number of the gate with the fewest blocks of the target among those with this quality.

    If no gate has it, return the number of the gate with the best quality.
    """
    good = [i for i, gate in enumerate(gates) if gate.quality.value >= quality]
    if good:
        return min(good, key=lambda i: gates[i].target_share)
    return max(range(len(gates)), key=lambda i: gates[i].quality.value)


def _summarize(trials: Sequence[Trial], base: Sequence[Trial], seed: int) -> Summary:
    qualities = [trial.quality for trial in trials]
    base_qualities = [trial.quality for trial in base]
    rounds, base_rounds = _round_seconds(trials), _round_seconds(base)
    speedups = [before / after for before, after in zip(base_rounds, rounds, strict=True)]
    drafted = sum(trial.drafted for trial in trials)
    return Summary(
        router=trials[0].router,
        score=mean(quality.score for quality in qualities),
        quality=ratio_interval([q.score for q in qualities], [q.score for q in base_qualities], seed=seed),
        held_out=ratio_interval([q.held_out for q in qualities], [q.held_out for q in base_qualities], seed=seed),
        distance=mean(quality.distance for quality in qualities),
        speedup=Speedup(median=median(speedups), min=min(speedups), max=max(speedups)),
        ms=1e3 * sum(rounds) / len(trials),
        target_share=sum(trial.by_target for trial in trials) / sum(trial.blocks for trial in trials),
        accepted_share=sum(trial.accepted for trial in trials) / drafted if drafted else None,
        failures=sum(trial.failures for trial in trials),
        overhead=_overhead(trials, base),
    )


def _round_seconds(trials: Sequence[Trial]) -> list[float]:
    totals: dict[int, float] = {}
    for trial in trials:
        totals[trial.round] = totals.get(trial.round, 0.0) + trial.seconds.total
    return [totals[round] for round in sorted(totals)]


def _overhead(trials: Sequence[Trial], base: Sequence[Trial]) -> float | None:
    scored = sum(trial.scored for trial in trials)
    if not scored:
        return None
    spent, target = total_seconds(trials), total_seconds(base)
    decoded = sum(trial.drafted + trial.by_target for trial in trials)
    target_block = (target.generate + target.commit) / sum(trial.blocks for trial in base)
    return (spent.decode / decoded + spent.score / scored) / target_block


def total_seconds(trials: Sequence[Trial]) -> Seconds:
    """Return the sums over all outputs."""
    return sum((trial.seconds for trial in trials), Seconds())
