"""Confidence intervals by the bootstrap (Efron 1979)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


def ratio_interval(
    values: Sequence[float], base: Sequence[float], *, seed: int = 0, confidence: float = _CONFIDENCE
) -> Interval:
    """Return the ratio of two means. Prompts are resampled; a prompt's value and base stay together.

    Args:
        values: of each prompt.
        base: of the same prompts.
        confidence: how often such intervals hold the true ratio.
    """
    pairs = np.array([values, base], dtype=np.float64)
    rows = np.random.default_rng(seed).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    resampled = pairs[:, rows].mean(-1)
    ratios = resampled[0] / resampled[1]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(value=float(pairs[0].mean() / pairs[1].mean()), low=float(low), high=float(high))
