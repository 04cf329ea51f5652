"""What lies in memory, and how many users share what is left of it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.plan.speedup import sequences_instead
from outrider.project.equations import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes in memory, and how many users share what is left of it."""

    memory: float | None  # bytes that may be used; None where nobody knows
    target_weights: float
    target_row: float  # the target's cache of one user
    draft_weights: float
    draft_row: float

    @classmethod
    def of(cls, target: Model, draft: Model | None, *, memory: float | None, context: int) -> MemoryBudget:
        """With `context` tokens cached a user, and `memory` bytes."""
        return cls(
            memory=memory,
            target_weights=target.held_bytes(),
            target_row=target.cache_bytes(context),
            draft_weights=draft.held_bytes() if draft else 0.0,
            draft_row=draft.cache_bytes(context) if draft else 0.0,
        )

    def held(self, rows: int) -> float:
        """Bytes of weights and caches while so many users are served with the draft."""
        return self.target_weights + self.draft_weights + rows * (self.target_row + self.draft_row)

    def max_sequences(self, *, draft: bool = True) -> int | None:
        """How many fit; None where the memory is not known."""
        if self.memory is None:
            return None
        left = self.memory - self.target_weights - (self.draft_weights if draft else 0.0)
        row = self.target_row + (self.draft_row if draft else 0.0)
        return max(int(left // row), 0)

    def draft_in_sequences(self, rows: int) -> float:
        """Users that could be served more without the draft, while it serves so many."""
        return sequences_instead(
            draft_weights=self.draft_weights, draft_cache=rows * self.draft_row, row_cache=self.target_row
        )
