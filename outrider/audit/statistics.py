"""Is a count what a law says it is, and how far can a rate be trusted?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.errors import OutriderError

_FEWEST = 5.0  # expected observations in a cell; with fewer the chi-square law is no good approximation
_ROUNDING = 1e-4  # by how much probabilities may miss a sum of 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GTest:
    """What a G-test found."""

    statistic: float  # G; infinite where the impossible was observed
    dof: int  # degrees of freedom: cells that are left after pooling, less one
    p_value: float  # the chance of a G at least as large if the law is true


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bounds of a rate."""

    low: float
    high: float


def g_test(observed: Sequence[int], expected: Sequence[float]) -> GTest:
    """Do counts come from the law? G = 2 sum_i O_i ln(O_i / E_i), chi-square (Sokal & Rohlf 1995, Biometry, ch. 17.1).

    Cells that expect fewer than 5 observations are pooled. The p-value is that of G / w, with
    w = 1 + (sum_i 1 / p_i - 1) / (6 n (c - 1)) over the c cells left: the correction of Williams (1976), Biometrika 63,
    without which a G-test rejects a true law too often.

    Args:
        observed: counts by cell.
        expected: probabilities by cell; they sum to 1.

    Raises:
        OutriderError: the two do not belong together, or are no counts and no law.
    """
    total = sum(observed)
    cells = _checked(observed, expected)
    if any(count for count, chance in cells if chance == 0):
        return GTest(statistic=math.inf, dof=max(sum(chance > 0 for _, chance in cells) - 1, 1), p_value=0.0)
    pooled = _pool([cell for cell in cells if cell[1] > 0], total)
    dof = len(pooled) - 1
    if not dof:
        return GTest(statistic=0.0, dof=0, p_value=1.0)
    statistic = 2 * sum(count * math.log(count / (total * chance)) for count, chance in pooled if count)
    statistic = max(statistic, 0.0)
    correction = 1 + (sum(1 / chance for _, chance in pooled) - 1) / (6 * total * dof)
    return GTest(statistic=statistic, dof=dof, p_value=chi_square_tail(statistic / correction, dof))


def chi_square_tail(value: float, dof: int) -> float:
    """P(X >= value) for chi-square X: the regularised upper incomplete gamma function Q(dof / 2, value / 2)."""
    half = torch.tensor([dof / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Bounds of a rate that was seen `successes` times in `trials` (Wilson 1927, JASA 22); no trials say nothing."""
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise OutriderError(f"{successes} of {trials} at confidence {confidence} is no rate; check the three numbers")
    if not trials:
        return Interval(low=0.0, high=1.0)
    z = float(torch.special.ndtri(torch.tensor((1 + confidence) / 2, dtype=torch.float64)))
    rate, scale = successes / trials, 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / scale
    reach = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At the ends the bound is the rate itself; rounding must not move it past.
    low = 0.0 if successes == 0 else max(middle - reach, 0.0)
    return Interval(low=low, high=1.0 if successes == trials else min(middle + reach, 1.0))


def _checked(observed: Sequence[int], expected: Sequence[float]) -> list[tuple[int, float]]:
    """(count, probability) by cell, the probabilities made to sum to 1."""
    if len(observed) != len(expected):
        raise OutriderError(f"{len(observed)} counts came with {len(expected)} probabilities; give one per cell")
    mass = math.fsum(expected)
    if min(observed, default=0) < 0 or min(expected, default=0.0) < 0 or not abs(mass - 1) < _ROUNDING:
        raise OutriderError(f"probabilities sum to {mass:g}; give counts and probabilities of at least 0 that sum to 1")
    return [(count, chance / mass) for count, chance in zip(observed, expected, strict=True)]


def _pool(cells: Sequence[tuple[int, float]], total: int) -> list[tuple[int, float]]:
    """One cell for all that expect too little; where even that is too little, the smallest other cell joins it."""
    ordered = sorted(cells, key=lambda cell: cell[1], reverse=True)
    large = [cell for cell in ordered if cell[1] * total >= _FEWEST]
    small = ordered[len(large) :]
    while small and large and sum(chance for _, chance in small) * total < _FEWEST:
        small.append(large.pop())
    rest = (sum(count for count, _ in small), math.fsum(chance for _, chance in small))
    return [*large, rest] if small else large
