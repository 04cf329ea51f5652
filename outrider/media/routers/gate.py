"""Accepts drafts whose score reaches a threshold, as in SDVG (https://arxiv.org/abs/2604.17397)."""

import math
from collections.abc import Callable

from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.contract import Choice, Judgment, Position

_WINDOW = "window:"


def parse_aggregate(name: str) -> Callable[[Tensor], float]:
    """Return the function that makes one score of the scores of all units.

    Args:
        name: `min`, `mean`, or `window:N` for the worst mean of N adjacent units.

    Raises:
        OutriderError: there is no such function.
    """
    if name == "min":
        return lambda scores: float(scores.min())
    if name == "mean":
        return lambda scores: float(scores.mean())
    width = name.removeprefix(_WINDOW)
    if name.startswith(_WINDOW) and width.isdecimal() and int(width) > 0:
        return lambda scores: _worst_window(scores, int(width))
    raise OutriderError(f"aggregate is {name!r}; use min, mean, or window:N with N of at least 1, such as window:4")


class QualityGate:
    """Accepts a draft if its aggregated score is at least `threshold`.

    Args:
        threshold: the least score of an accepted draft.
        aggregate: `min`, `mean` or `window:N`; see `parse_aggregate`.
        force_first: the target always makes block 0, which all later blocks continue.
        budget: the most blocks that the target makes in one output, block 0 counted. After that,
            drafts are accepted without a score. None: no limit.
        quality: the measured score of its outputs as a share of target-only's, if it is known.

    Raises:
        OutriderError: the threshold is not a finite number, or another argument has no meaning.
    """

    def __init__(
        self,
        threshold: float,
        *,
        aggregate: str = "min",
        force_first: bool = True,
        budget: int | None = None,
        quality: float | None = None,
    ) -> None:
        if not math.isfinite(threshold):
            raise OutriderError(f"threshold is {threshold}; use a finite number")
        if budget is not None and budget < int(force_first):
            raise OutriderError(f"budget is {budget}; use at least {int(force_first)}, or None for no limit")
        self.threshold: float | None = threshold
        self.aggregate = aggregate
        self.force_first = force_first
        self.budget = budget
        self.quality = quality
        self._threshold = threshold
        self._aggregated = parse_aggregate(aggregate)

    @property
    def name(self) -> str:
        """The name in tables and results."""
        first = "" if self.force_first else ", not forced"
        return f"gate {self.aggregate} ≥ {self._threshold:g}{first}"

    def choose(self, position: Position) -> Choice:
        """Return what to do for the next block."""
        if self.force_first and position.block == 0:
            return Choice.TARGET
        if self.budget is not None and position.by_target >= self.budget:
            return Choice.DRAFT
        return Choice.SCORE

    def judge(self, scores: Tensor) -> Judgment:
        """Return the aggregated score, and whether it reaches the threshold."""
        score = self._aggregated(scores)
        return Judgment(score=score, accepted=score >= self._threshold)


def _worst_window(scores: Tensor, width: int) -> float:
    windows = scores.unfold(0, min(width, len(scores)), 1)
    return float(windows.mean(-1).min())
