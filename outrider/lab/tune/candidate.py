"""Compares a proposer and a draft length with plain decoding at several temperatures."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from outrider.lab.common.trial import Choice, Variant
from outrider.lab.tune.figures import Estimate

WORTHWHILE = 1.02  # overall speedup below which plain decoding is recommended


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Choice):
    """A proposer and a draft length, which one configuration would use at all of some temperatures."""

    speedups: Mapping[float, Estimate]  # overall, by temperature

    @property
    def overall(self) -> Estimate:
        """The geometric mean of the speedups.

        Its interval is between the geometric means of the bounds. It is exact if the speedups rise and fall together,
        and too wide otherwise.
        """
        estimates = self.speedups.values()
        lows = [each.low for each in estimates if each.low is not None]
        highs = [each.high for each in estimates if each.high is not None]
        known = len(lows) == len(highs) == len(estimates)
        return Estimate(
            value=_geometric_mean([each.value for each in estimates]),
            low=_geometric_mean(lows) if known else None,
            high=_geometric_mean(highs) if known else None,
        )

    @property
    def loses_at(self) -> tuple[float, ...]:
        """The temperatures at which its whole interval is below 1."""
        return tuple(temperature for temperature, speedup in self.speedups.items() if speedup.is_slower)

    @property
    def worthwhile(self) -> bool:
        """Whether it gains, significantly so if an interval is known, and is slower at no temperature."""
        overall = self.overall
        return overall.value >= WORTHWHILE and (overall.low is None or overall.is_faster) and not self.loses_at


def group(speedups: Iterable[tuple[Variant, Estimate]]) -> list[Candidate]:
    """Return the candidates of variants at one batch size, each with its overall speedup over plain decoding."""
    grouped: dict[Choice, dict[float, Estimate]] = {}
    for variant, speedup in speedups:
        grouped.setdefault(variant.choice, {})[variant.temperature] = speedup
    return [Candidate(**asdict(choice), speedups=each) for choice, each in grouped.items()]


def fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the highest geometric mean of its speedups; None: there is none."""
    return max(candidates, key=lambda each: each.overall.value, default=None)


def fastest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates by geometric mean, best first. Those that are slower at a temperature come last."""
    return sorted(candidates, key=lambda each: (not each.loses_at, each.overall.value), reverse=True)


def _geometric_mean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))
