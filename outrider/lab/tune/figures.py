"""Computes figures from trials: speedups with intervals, acceptance by category and output third, times of a round."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add

from outrider.core.stats import Stats
from outrider.lab.common.trial import PHASES, Trial, Variant
from outrider.runtime.grouping import group_by

_RESAMPLES = 1000
_TAIL = 0.025  # share of the resamples on each side of an interval

Amounts = tuple[float, float]  # tokens and seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio with its 95% interval over prompts. There is no interval for a single batch of prompts."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The estimate with its interval: 1.52 (1.40 to 1.63)."""
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is below 1. Without an interval, whether the value is."""
        return (self.value if self.high is None else self.high) < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSummary:
    """Acceptance of some of the passes."""

    tau: float
    acceptance: tuple[float, ...]  # by position
    speedup: float | None = None  # of decoding; None: not measured separately

    @classmethod
    def of(cls, stats: Stats, speedup: float | None = None) -> AcceptanceSummary:
        """Return the acceptance of statistics."""
        return cls(tau=stats.tau, acceptance=stats.acceptance, speedup=speedup)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMs:
    """Milliseconds of a decoding round."""

    draft: float
    target: float
    host: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole round."""
        return self.draft + self.target + self.host

    @classmethod
    def of(cls, stats: Stats) -> RoundMs:
        """Return the means over the rounds of statistics."""
        unit = 1e3 / max(stats.rounds, 1)
        return cls(draft=stats.draft_seconds * unit, target=stats.target_seconds * unit, host=stats.host_seconds * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decoding at one batch size and temperature."""

    batch: int  # sequences at once
    temperature: float
    batches: int  # of prompts that were measured
    tokens_per_s: float | None  # of decoding; None: outputs ended in one round
    prefill_share: float  # share of the time until every sequence has a token
    parts: RoundMs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Variant):
    """A proposer and a k at one batch size and temperature, compared with plain decoding."""

    tokens_per_s: float | None  # of decoding
    speedup: Estimate | None  # of decoding; None: outputs ended in one round
    overall: Estimate  # speedup with prefill
    total: AcceptanceSummary
    nodes: float  # draft tokens per pass
    parts: RoundMs
    categories: Mapping[str, AcceptanceSummary]
    output_thirds: Mapping[str, AcceptanceSummary]
    exact: bool

    def break_even_tau(self, plain: Plain) -> float:
        """Return the tokens per pass from which a round is worth its time."""
        return self.parts.total / plain.parts.total if plain.parts.total else 0.0


def figures(trials: Sequence[Trial], *, seed: int) -> tuple[list[Plain], list[Case]]:
    """Return plain decoding at every batch and temperature, and all cases, in the order of their first trials."""
    by_variant = group_by(trials, lambda trial: trial.variant)
    plain_trials = {}
    for variant, group in by_variant.items():
        if variant.plain:
            plain_trials[variant.batch, variant.temperature] = group
    plains = list(map(_plain, plain_trials.values()))
    cases = []
    for variant, group in by_variant.items():
        if not variant.plain:
            cases.append(_case(group, plain_trials[variant.batch, variant.temperature], seed=seed))
    return plains, cases


def ratio(amounts: Sequence[Amounts], base: Sequence[Amounts], *, seed: int) -> Estimate | None:
    """Return the ratio of two speeds, with an interval from a bootstrap over pairs (Efron 1979).

    Pairs are resampled and pooled. The interval is between percentiles of the resampled ratios.

    Args:
        amounts: tokens and seconds of each batch of prompts.
        base: the same of plain decoding, in the same order.

    Returns:
        None if there were no tokens or no seconds.
    """
    pairs = list(zip(amounts, base, strict=True))
    value = _pooled_ratio(pairs)
    if value is None:
        return None
    if len(pairs) < 2:
        return Estimate(value=value)
    generator = random.Random(seed)
    resampled = (_pooled_ratio(generator.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    ordered = sorted(each for each in resampled if each is not None)
    tail = int(_TAIL * len(ordered))
    return Estimate(value=value, low=ordered[tail], high=ordered[-1 - tail])


def _pooled_ratio(pairs: Sequence[tuple[Amounts, Amounts]]) -> float | None:
    """Return the ratio of the speeds that summed tokens and seconds give."""
    tokens = sum(amounts[0] for amounts, _ in pairs)
    seconds = sum(amounts[1] for amounts, _ in pairs)
    base_tokens = sum(base[0] for _, base in pairs)
    base_seconds = sum(base[1] for _, base in pairs)
    if not (tokens and seconds and base_tokens and base_seconds):
        return None
    return (tokens / seconds) / (base_tokens / base_seconds)


def typical(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trial of median speed of each batch of prompts, so that disturbed rounds do not count."""
    medians = []
    for group in group_by(trials, lambda trial: trial.batch_number).values():
        fastest_first = sorted(group, key=lambda trial: trial.tokens / trial.seconds, reverse=True)
        medians.append(fastest_first[(len(group) - 1) // 2])
    return medians


def _decoding(trial: Trial) -> Amounts:
    return float(trial.speed.tokens), trial.speed.seconds


def _whole(trial: Trial) -> Amounts:
    return float(trial.tokens), trial.seconds


def _compare(
    trials: Sequence[Trial], plain: Sequence[Trial], amounts: Callable[[Trial], Amounts], seed: int
) -> Estimate | None:
    """Return the ratio to plain decoding, by batch of prompts: repeats of one batch are no independent samples."""
    by_batch = {trial.batch_number: amounts(trial) for trial in typical(trials)}
    plain_by_batch = {trial.batch_number: amounts(trial) for trial in typical(plain)}
    return ratio([by_batch[number] for number in plain_by_batch], list(plain_by_batch.values()), seed=seed)


def _rate(trials: Sequence[Trial]) -> float | None:
    return sum((trial.speed for trial in trials[1:]), trials[0].speed).rate


def _plain(trials: Sequence[Trial]) -> Plain:
    medians = typical(trials)
    return Plain(
        batch=trials[0].variant.batch,
        temperature=trials[0].variant.temperature,
        batches=len(medians),
        tokens_per_s=_rate(medians),
        prefill_share=sum(trial.prefill_seconds for trial in medians) / sum(trial.seconds for trial in medians),
        parts=RoundMs.of(_sum(trial.stats for trial in medians)),
    )


def _case(trials: Sequence[Trial], plain: Sequence[Trial], *, seed: int) -> Case:
    stats = _sum(trial.stats for trial in trials)
    medians = typical(trials)
    overall = _compare(trials, plain, _whole, seed)
    thirds = map(_sum, zip(*(trial.output_thirds for trial in trials), strict=True))
    assert overall is not None  # a completion has at least one token and takes time
    return Case(
        **asdict(trials[0].variant),
        tokens_per_s=_rate(medians),
        speedup=_compare(trials, plain, _decoding, seed),
        overall=overall,
        total=AcceptanceSummary.of(stats),
        nodes=stats.draft_tokens / stats.passes,
        parts=RoundMs.of(_sum(trial.stats for trial in medians)),
        categories=_categories(trials, plain, seed),
        output_thirds=dict(zip(PHASES, map(AcceptanceSummary.of, thirds), strict=True)),
        exact=stats.exact,
    )


def _categories(trials: Sequence[Trial], plain: Sequence[Trial], seed: int) -> dict[str, AcceptanceSummary]:
    """Return the acceptance by category, and the speedup of categories that share no batch with another one."""
    names = dict.fromkeys(name for trial in trials for name in trial.categories)
    summaries = {}
    for name in names:
        stats = _sum(trial.categories[name] for trial in trials if name in trial.categories)
        shares_batch = any(name in trial.categories and len(trial.categories) > 1 for trial in trials)
        speedup = None
        if not shares_batch:
            estimate = _compare(_only(name, trials), _only(name, plain), _decoding, seed)
            speedup = estimate.value if estimate else None
        summaries[name] = AcceptanceSummary.of(stats, speedup)
    return summaries


def _only(category: str, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose prompts are all of one category."""
    return [trial for trial in trials if set(trial.categories) == {category}]


def _sum(stats: Iterable[Stats]) -> Stats:
    return reduce(add, stats, Stats())
