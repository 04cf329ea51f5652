"""Estimates of acceptance by kind of draft token, learned from rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outrider.propose.tree_builder import TreeBuilder

LEAST = 0.02  # draft tokens with a lower estimated acceptance are left out
_TRUST = 4.0  # weight of the prior, in draft tokens
_MEMORY = 0.99  # decay per draft token of the kind


class AcceptanceEstimator:
    """Decayed acceptance counts by kind, of draft tokens whose ancestors were accepted.

    A kind is what distinguishes good draft tokens from bad ones, such as the length of a match or a rank. The number of
    kinds must be bounded.
    """

    def __init__(self, *, trust: float = _TRUST, memory: float = _MEMORY) -> None:
        """Weigh the prior as `trust` draft tokens. Counts decay by `memory` with each further draft token."""
        self._trust, self._memory = trust, memory
        self._seen: dict[Hashable, tuple[float, float]] = {}  # reached, accepted

    def of(self, kind: Hashable, expected: float) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is.

        `expected` is the prior.
        """
        met, kept = self._seen.get(kind, (0.0, 0.0))
        return (kept + self._trust * expected) / (met + self._trust)

    def learn(self, sketch: TreeBuilder, kinds: Sequence[Hashable], emitted: Sequence[int]) -> None:
        """Learn from the draft of a sequence, with `kinds` [N], after the tokens `emitted` were committed."""
        if not emitted:
            return
        path = sketch.path(emitted)
        at = {-1, *path}
        for node, (kind, parent) in enumerate(zip(kinds, sketch.parent, strict=True)):
            # Nothing is known below the last emitted token.
            if parent in at and (parent < 0 or parent != path[-1] or len(path) < len(emitted)):
                met, kept = self._seen.get(kind, (0.0, 0.0))
                self._seen[kind] = met * self._memory + 1, kept * self._memory + (node in at)
