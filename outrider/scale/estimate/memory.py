"""Compute how many sequences fit into memory, with and without a draft."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.plan.speedup import sequences_instead
from outrider.scale.estimate.equations import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of weights and KV caches, in bytes."""

    memory: float | None  # usable memory; None: unknown
    target_weights: float
    target_cache: float  # KV cache of the target for one sequence
    draft_weights: float
    draft_cache: float  # KV cache of the draft for one sequence

    @classmethod
    def of(cls, target: Model, draft: Model | None, *, memory: float | None, context: int) -> MemoryBudget:
        """Return the budget for sequences of `context` cached tokens in `memory` bytes."""
        return cls(
            memory=memory,
            target_weights=target.held_bytes(),
            target_cache=target.cache_bytes(context),
            draft_weights=draft.held_bytes() if draft else 0.0,
            draft_cache=draft.cache_bytes(context) if draft else 0.0,
        )

    def held(self, seqs: int) -> float:
        """Return the bytes of weights and caches of this many sequences, with the draft."""
        return self.target_weights + self.draft_weights + seqs * (self.target_cache + self.draft_cache)

    def max_sequences(self, *, draft: bool = True) -> int | None:
        """Return how many sequences fit, with or without the draft; None: the memory is unknown."""
        if self.memory is None:
            return None
        free = self.memory - self.target_weights - (self.draft_weights if draft else 0.0)
        cache = self.target_cache + (self.draft_cache if draft else 0.0)
        return max(int(free // cache), 0)

    def draft_in_sequences(self, seqs: int) -> float:
        """Return how many more sequences would fit without the draft, if it drafts for `seqs` sequences."""
        return sequences_instead(
            draft_weights=self.draft_weights, draft_cache=seqs * self.draft_cache, row_cache=self.target_cache
        )
