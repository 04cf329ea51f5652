"""From trials to figures: speedups and how sure they are, acceptance by category and phase, the parts of a round."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

from outrider.core.stats import Stats
from outrider.tune.settings import PHASES
from outrider.tune.trial import Trial, Variant

_RESAMPLES = 1000
_TAIL = 0.025  # on each side of an interval

Amounts = tuple[float, float]  # tokens and seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio and its 95% interval over prompts; no interval where there was one batch of prompts alone."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sure(self) -> bool:
        """Whether all of the interval is a gain."""
        return self.low is not None and self.low > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSummary:
    """How good guesses were, somewhere."""

    tau: float
    acceptance: tuple[float, ...]  # by position
    speedup: float | None = None  # of decoding; None where it was not told apart

    @classmethod
    def of(cls, stats: Stats, speedup: float | None = None) -> AcceptanceSummary:
        """Of what was counted there."""
        return cls(tau=stats.tau, acceptance=stats.acceptance, speedup=speedup)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMs:
    """Milliseconds of a round of decoding."""

    draft: float
    target: float
    host: float

    @property
    def total(self) -> float:
        """Of the round."""
        return self.draft + self.target + self.host

    @classmethod
    def of(cls, stats: Stats) -> RoundMs:
        """The mean of the rounds that were counted."""
        unit = 1e3 / max(stats.rounds, 1)
        return cls(draft=stats.draft_seconds * unit, target=stats.target_seconds * unit, host=stats.host_seconds * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decoding at one place."""

    variant: Variant
    tokens_per_s: float | None  # tokens/s of decoding; None where outputs were over in one round
    prefill_share: float  # share of the time until every row had a token
    parts: RoundMs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to guess at one place, beside plain decoding there."""

    variant: Variant
    tokens_per_s: float | None  # tokens/s of decoding
    speedup: Estimate | None  # of decoding alone; None where outputs were over in one round
    overall: Estimate  # of the whole, the reading of prompts included
    total: AcceptanceSummary
    nodes: float  # guesses verified a pass
    parts: RoundMs
    categories: Mapping[str, AcceptanceSummary]
    output_thirds: Mapping[str, AcceptanceSummary]
    exact: bool

    def break_even_tau(self, plain: Plain) -> float:
        """Tokens that a pass must emit for a round to be worth its time."""
        return self.parts.total / plain.parts.total if plain.parts.total else 0.0


def figures(trials: Sequence[Trial], *, seed: int) -> tuple[list[Plain], list[Case]]:
    """All places' plain decoding, and all cases, in the order of their first trials."""
    groups: dict[Variant, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.variant, []).append(trial)
    base = {(way.batch, way.temperature): some for way, some in groups.items() if way.plain}
    plains = [_plain(some) for some in base.values()]
    cases = [_case(some, base[way.batch, way.temperature], seed=seed) for way, some in groups.items() if not way.plain]
    return plains, cases


def ratio(ours: Sequence[Amounts], theirs: Sequence[Amounts], *, seed: int) -> Estimate | None:
    """Tokens a second over theirs, and a bootstrap over the pairs (Efron 1979): resampled pairs, pooled, percentiles.

    Args:
        ours: tokens and seconds of each batch of prompts.
        theirs: the same of plain decoding, in the same order.
        seed: of the resampling.

    Returns:
        None where nothing was emitted, or in no time.
    """
    pairs = list(zip(ours, theirs, strict=True))
    value = _pooled(pairs)
    if value is None:
        return None
    if len(pairs) < 2:
        return Estimate(value=value)
    chance = random.Random(seed)
    drawn = (_pooled(chance.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    found = sorted(each for each in drawn if each is not None)
    at = int(_TAIL * len(found))
    return Estimate(value=value, low=found[at], high=found[-1 - at])


def case_dict(case: Case) -> dict[str, Any]:
    """For JSON: the way's own fields beside the figures."""
    found = asdict(case)
    return {**found.pop("variant"), **found}


def _pooled(pairs: Iterable[tuple[Amounts, Amounts]]) -> float | None:
    some = list(pairs)
    tokens, seconds, base_tokens, base_seconds = (sum(pair[i][j] for pair in some) for i in (0, 1) for j in (0, 1))
    if not (tokens and seconds and base_tokens and base_seconds):
        return None
    return (tokens / seconds) / (base_tokens / base_seconds)


def typical(trials: Sequence[Trial]) -> list[Trial]:
    """Of each batch of prompts the round of median speed: a round in which the machine was disturbed says nothing."""
    rounds: dict[int, list[Trial]] = {}
    for trial in trials:
        rounds.setdefault(trial.repeat, []).append(trial)
    return [
        sorted(some, key=lambda trial: trial.tokens / trial.seconds, reverse=True)[(len(some) - 1) // 2]
        for some in rounds.values()
    ]


def _decoding(trial: Trial) -> Amounts:
    return float(trial.pace.tokens), trial.pace.seconds


def _whole(trial: Trial) -> Amounts:
    return float(trial.tokens), trial.seconds


def _compared(
    ours: Sequence[Trial], theirs: Sequence[Trial], of: Callable[[Trial], Amounts], seed: int
) -> Estimate | None:
    """Both by batches of prompts: rounds over the same ones are no prompts of their own."""
    left = {trial.repeat: of(trial) for trial in typical(ours)}
    right = {trial.repeat: of(trial) for trial in typical(theirs)}
    return ratio([left[heat] for heat in right], list(right.values()), seed=seed)


def _rate(trials: Sequence[Trial]) -> float | None:
    return sum((trial.pace for trial in trials[1:]), trials[0].pace).rate


def _plain(trials: Sequence[Trial]) -> Plain:
    some = typical(trials)
    return Plain(
        variant=trials[0].variant,
        tokens_per_s=_rate(some),
        prefill_share=sum(trial.prefill_seconds for trial in some) / sum(trial.seconds for trial in some),
        parts=RoundMs.of(_sum(trial.stats for trial in some)),
    )


def _case(trials: Sequence[Trial], plain: Sequence[Trial], *, seed: int) -> Case:
    stats, some = _sum(trial.stats for trial in trials), typical(trials)
    overall = _compared(trials, plain, _whole, seed)
    assert overall is not None  # a completion has a token, and takes time
    return Case(
        variant=trials[0].variant,
        tokens_per_s=_rate(some),
        speedup=_compared(trials, plain, _decoding, seed),
        overall=overall,
        total=AcceptanceSummary.of(stats),
        nodes=stats.draft_tokens / stats.passes,
        parts=RoundMs.of(_sum(trial.stats for trial in some)),
        categories=_categories(trials, plain, seed),
        output_thirds={
            name: AcceptanceSummary.of(_sum(trial.output_thirds[i] for trial in trials))
            for i, name in enumerate(PHASES)
        },
        exact=all(trial.exact for trial in trials),
    )


def _categories(trials: Sequence[Trial], plain: Sequence[Trial], seed: int) -> dict[str, AcceptanceSummary]:
    """Acceptance by category; speed as well where no batch holds two of them."""
    names = dict.fromkeys(name for trial in trials for name in trial.categories)
    found = {}
    for name in names:
        stats = _sum(trial.categories[name] for trial in trials if name in trial.categories)
        ours, theirs = ([trial for trial in some if set(trial.categories) == {name}] for some in (trials, plain))
        apart = not any(name in trial.categories and len(trial.categories) > 1 for trial in trials)
        estimate = _compared(ours, theirs, _decoding, seed) if apart else None
        found[name] = AcceptanceSummary.of(stats, estimate.value if estimate else None)
    return found


def _sum(stats: Iterable[Stats]) -> Stats:
    return reduce(add, stats, Stats())
