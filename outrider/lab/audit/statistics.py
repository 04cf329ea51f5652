"""Statistical tests of the audit: a G-test of counts, and confidence intervals of rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.errors import OutriderError

_MIN_EXPECTED = 5.0  # expected count of a cell; with fewer, the chi-square approximation is poor
_LARGE = 1e6  # noncentrality from which the distribution is as good as normal
_TOLERANCE = 1e-4  # largest difference between the sum of probabilities and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GTest:
    """The result of a G-test."""

    statistic: float  # G; infinite if an outcome of probability 0 was observed
    dof: int  # degrees of freedom: the number of cells after pooling, minus 1
    p_value: float  # probability of a G at least as large, if the distribution is right


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bounds of a rate."""

    low: float
    high: float


def g_test(observed: Sequence[int], expected: Sequence[float]) -> GTest:
    """Return the G-test of counts against a distribution (Sokal & Rohlf 1995, Biometry, ch. 17.1).

    G = 2 sum_i O_i ln(O_i / E_i) has approximately a chi-square distribution. Cells with fewer than 5 expected
    observations are pooled. The p-value is that of G / w, with w = 1 + (sum_i 1 / p_i - 1) / (6 n (c - 1)) over the c
    remaining cells. This is the correction of Williams (1976), Biometrika 63. Without it, a G-test rejects the right
    distribution too often.

    Args:
        observed: counts by cell.
        expected: probabilities by cell; they sum to 1.

    Raises:
        OutriderError: the lengths differ, a value is negative, or the probabilities do not sum to 1.
    """
    total = sum(observed)
    cells = _checked(observed, expected)
    if any(count for count, prob in cells if prob == 0):
        return GTest(statistic=math.inf, dof=max(sum(prob > 0 for _, prob in cells) - 1, 1), p_value=0.0)
    pooled = _pool([cell for cell in cells if cell[1] > 0], total)
    dof = len(pooled) - 1
    if not dof:
        return GTest(statistic=0.0, dof=0, p_value=1.0)
    statistic = 2 * sum(count * math.log(count / (total * prob)) for count, prob in pooled if count)
    statistic = max(statistic, 0.0)
    correction = 1 + (sum(1 / prob for _, prob in pooled) - 1) / (6 * total * dof)
    return GTest(statistic=statistic, dof=dof, p_value=chi_square_tail(statistic / correction, dof))


def chi_square_tail(value: float, dof: int) -> float:
    """Return P(X >= value) for chi-square X: the regularized upper incomplete gamma function Q(dof / 2, value / 2)."""
    half = torch.tensor([dof / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_tail(value: float, dof: int, noncentrality: float) -> float:
    """Return P(X >= value) for noncentral chi-square X: a Poisson mixture of central ones (Patnaik 1949, Biometrika).

    Args:
        value: at least 0.
        dof: degrees of freedom, at least 1.
        noncentrality: at least 0; 0 is the central distribution.
    """
    if not noncentrality:
        return chi_square_tail(value, dof)
    if noncentrality > _LARGE:
        deviation = math.sqrt(2 * (dof + 2 * noncentrality))
        return float(torch.special.ndtr(torch.tensor((dof + noncentrality - value) / deviation, dtype=torch.float64)))
    half = noncentrality / 2
    spread = 12 * math.sqrt(half) + 40  # beyond it the weights of the mixture vanish
    terms = torch.arange(max(0, int(half - spread)), int(half + spread), dtype=torch.float64)
    weights = (terms * math.log(half) - half - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(dof / 2 + terms, torch.full_like(terms, value / 2))
    return float((weights * tails).sum().clamp(0, 1))


def power(dof: int, noncentrality: float, level: float, *, allowed: float = 0.0) -> float:
    """Return the probability that a chi-square test finds a difference.

    Args:
        dof: degrees of freedom, at least 1.
        noncentrality: samples times the chi-square distance of the two distributions.
        allowed: the noncentrality that the test does not count as a difference.
    """
    low, high = 0.0, 10.0 * (dof + 100) + 4 * allowed
    for _ in range(60):  # bisection for the critical value
        middle = (low + high) / 2
        if noncentral_tail(middle, dof, allowed) > level:
            low = middle
        else:
            high = middle
    return noncentral_tail(high, dof, noncentrality)


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Return the Wilson interval of a rate (Wilson 1927, JASA 22). Without trials it is from 0 to 1."""
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise OutriderError(
            f"{successes} successes in {trials} trials at confidence {confidence} is invalid; use 0 <= successes <="
            " trials and 0 < confidence < 1"
        )
    if not trials:
        return Interval(low=0.0, high=1.0)
    z = float(torch.special.ndtri(torch.tensor((1 + confidence) / 2, dtype=torch.float64)))
    rate = successes / trials
    scale = 1 + z * z / trials
    center = (rate + z * z / (2 * trials)) / scale
    margin = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At 0 and 1 the bound is the rate itself. Rounding must not move it further.
    low = 0.0 if successes == 0 else max(center - margin, 0.0)
    high = 1.0 if successes == trials else min(center + margin, 1.0)
    return Interval(low=low, high=high)


def _checked(observed: Sequence[int], expected: Sequence[float]) -> list[tuple[int, float]]:
    """Return (count, probability) by cell, with probabilities that sum to 1."""
    if len(observed) != len(expected):
        raise OutriderError(
            f"there are {len(observed)} counts and {len(expected)} probabilities; give one of each per cell"
        )
    mass = math.fsum(expected)
    if min(observed, default=0) < 0 or min(expected, default=0.0) < 0 or not abs(mass - 1) < _TOLERANCE:
        raise OutriderError(f"probabilities sum to {mass:g}; give counts and probabilities of at least 0 that sum to 1")
    return [(count, prob / mass) for count, prob in zip(observed, expected, strict=True)]


def _pool(cells: Sequence[tuple[int, float]], total: int) -> list[tuple[int, float]]:
    """Return cells in which those with too few expected observations are one, if needed with the next smallest ones."""
    ordered = sorted(cells, key=lambda cell: cell[1], reverse=True)
    large = [cell for cell in ordered if cell[1] * total >= _MIN_EXPECTED]
    small = ordered[len(large) :]
    while small and large and sum(prob for _, prob in small) * total < _MIN_EXPECTED:
        small.append(large.pop())
    pooled = (sum(count for count, _ in small), math.fsum(prob for _, prob in small))
    return [*large, pooled] if small else large
