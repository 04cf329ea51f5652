"""Computes the reported figures from trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add, attrgetter
from statistics import median
from typing import Any

from outrider.core.bound import Bound
from outrider.core.stats import Stats
from outrider.drafting.plan import speedup
from outrider.lab.common.trial import Trial
from outrider.runtime.grouping import group_by

OVERALL = "overall"  # all categories together
DEFINITIONS: Mapping[str, str] = {
    "tokens_per_s": "decoding only: the tokens after the first round at whose end every sequence had one, over the time"
    " from the end of that round to the end of the last; pooled over prompts, then the median over repeats",
    "speedup": "tokens_per_s over that of plain: the median of this ratio over repeats",
    "tau": "tokens per pass of a decoding sequence, with the bonus token; 1 is plain decoding",
    "acceptance_by_position": "the share of draft tokens that were accepted, among those whose ancestors were all"
    " accepted",
    "latency_ms": "time between the tokens of a sequence; the tokens of one round arrive together, so the first one"
    " waits for the whole round and the others do not wait",
    "draft_ms, target_ms, host_ms": "a round of decoding: drafting, the target's forward pass, and the rest; on a GPU"
    " the wait for the device counts as host",
    "experts": "distinct routed experts of a layer that a pass of the target used, the mean over layers and rounds; 0:"
    " the target has none, or they are not counted on this device",
    "expected_speedup": "E[tau] / (k c + v + h) of Leviathan et al. 2023, theorem 3.8, with the measured acceptance,"
    " draft cost c, verification cost v and host cost h, in units of a plain round",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range over repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of known values, or None if every completion ended in its first round."""
        known = [value for value in values if value is not None]
        return cls(median=median(known), min=min(known), max=max(known)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles of the time between tokens, in milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, gaps: Iterable[float]) -> Latency | None:
        """Return percentiles of gaps in seconds, or None without gaps."""
        ordered = sorted(gaps)
        if not ordered:
            return None
        p50, p95, p99 = (1e3 * ordered[round(share * (len(ordered) - 1))] for share in (0.50, 0.95, 0.99))
        return cls(p50=p50, p95=p95, p99=p99)

    def __str__(self) -> str:
        return f"{self.p50:.1f} {self.p95:.1f} {self.p99:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Plain or speculative decoding of some prompts."""

    tokens_per_s: Spread | None
    speedup: Spread | None
    latency_ms: Latency | None
    stats: Stats

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, with those of the statistics."""
        figures = asdict(replace(self, stats=Stats()))
        del figures["stats"]
        return figures | self.stats.as_dict()

    @property
    def experts(self) -> float:
        """Distinct experts of a layer in a round."""
        return self.stats.experts / self.stats.rounds if self.stats.rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Plain and speculative decoding of the same prompts."""

    plain: Decoding
    speculative: Decoding

    @property
    def expected_speedup(self) -> float | None:
        """The speedup that follows from measured acceptance and costs; None: too little was measured."""
        return expected_speedup(self.plain.stats, self.speculative.stats)

    def as_dict(self) -> dict[str, Any]:
        """Return both for JSON."""
        expected = {"expected_speedup": self.expected_speedup}
        return {"plain": self.plain.as_dict(), "speculative": self.speculative.as_dict() | expected}


def compare(trials: Sequence[Trial], k: int | str, bound: Bound | None = None) -> dict[str, Comparison]:
    """Return the comparison of draft length `k` with plain decoding: by category, and of all under "overall".

    Args:
        trials: each of prompts of one category.
        k: the draft length that is called speculative. 0 compares plain decoding with itself.
        bound: the bound of the verifier.
    """
    categories = group_by(trials, _category)
    by_category = {category: _compare(group, k, bound) for category, group in categories.items()}
    return {**by_category, OVERALL: _compare(trials, k, bound)}


def mean_cached(trials: Sequence[Trial], *, seqs: int) -> float:
    """Return the mean number of cached tokens of a sequence during plain decoding."""
    plain = [trial.stats for trial in trials if trial.variant.plain]
    return sum(stats.prompt_tokens + stats.output_tokens / 2 for stats in plain) / seqs / len(plain)


def expected_speedup(plain: Stats, speculative: Stats) -> float | None:
    """Return the speedup that follows from measured acceptance and costs, or None if too little was measured.

    A pass without a draft counts as one whose first draft token was rejected, so the formula needs no case for it.
    """
    if not plain.rounds or not speculative.rounds or not plain.seconds:
        return None
    reached = (speculative.passes, *speculative.accepted[:-1])
    acceptance = [
        accepted / count if count else 0.0 for accepted, count in zip(speculative.accepted, reached, strict=False)
    ]
    unit = plain.seconds / plain.rounds * speculative.rounds  # seconds of as many plain rounds
    return speedup.speedup(
        speedup.expected_tau(acceptance),
        k=1,  # the draft cost is that of all draft tokens of a round
        draft=speculative.draft_seconds / unit,
        verify=speculative.target_seconds / unit,
        host=speculative.host_seconds / unit,
    )


def _category(trial: Trial) -> str:
    (category,) = trial.categories
    return category


def _compare(trials: Sequence[Trial], k: int | str, bound: Bound | None) -> Comparison:
    plain = [trial for trial in trials if trial.variant.plain]
    other = [trial for trial in trials if trial.variant.k == k]
    base = _rates(plain)
    return Comparison(plain=_decoding(plain, base, bound), speculative=_decoding(other, base, bound))


def _decoding(trials: Sequence[Trial], base: Sequence[float | None], bound: Bound | None) -> Decoding:
    """Return the figures of trials. `base` are the tokens/s of plain decoding by repeat."""
    rates = _rates(trials)
    return Decoding(
        tokens_per_s=Spread.of(rates),
        speedup=Spread.of(rate / plain if rate and plain else None for rate, plain in zip(rates, base, strict=True)),
        latency_ms=Latency.of(gap for trial in trials for gap in trial.gaps),
        stats=replace(reduce(add, (trial.stats for trial in trials)), bound=bound),
    )


def _rates(trials: Sequence[Trial]) -> list[float | None]:
    """Return the tokens/s of each repeat."""
    repeats = group_by(trials, lambda trial: trial.repeat)
    speeds = (map(attrgetter("speed"), repeats[repeat]) for repeat in sorted(repeats))
    return [reduce(add, each).rate for each in speeds]
