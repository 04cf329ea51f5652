"""How far to speculate."""

from __future__ import annotations

from typing import Protocol

from outrider.errors import OutriderError
from outrider.stats import Stats
from outrider.types import Batch


class Planner(Protocol):
    """Shares out guesses.

    Law: it decides from the committed text and from what rounds before have shown, never from a token that it might
    drop; so the output stays exact. It only lowers `batch.budget`, which is what each row could use at most.
    """

    def budget(self, batch: Batch, stats: Stats) -> tuple[int, ...]:
        """[B] guesses for each row; 0 = do not speculate."""


class FixedPlanner:
    """k guesses, always."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"k is {k}; use 0 for plain decoding or a number of guesses above it")
        self._k = k

    def budget(self, batch: Batch, stats: Stats) -> tuple[int, ...]:
        return tuple(min(self._k, most) for most in batch.budget)
