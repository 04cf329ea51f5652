"""How often guesses of a kind are kept, learned from rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outrider.propose.tree_builder import TreeBuilder

LEAST = 0.02  # the chance below which a guess by counts is not worth its place in a pass
_TRUST = 4.0  # what is expected beforehand counts as so many guesses seen
_MEMORY = 0.99  # weight of a guess seen one guess of its kind earlier


class AcceptanceEstimator:
    """Decayed counts of guesses by kind, of those whose ancestors were all kept.

    A kind is whatever tells good guesses from bad ones: how long a text matched, which rank a successor had. There
    must be a bounded number of them.
    """

    def __init__(self, *, trust: float = _TRUST, memory: float = _MEMORY) -> None:
        """Count what is expected beforehand as `trust` guesses, and a guess `memory` times with each later one."""
        self._trust, self._memory = trust, memory
        self._seen: dict[Hashable, tuple[float, float]] = {}  # met, kept

    def of(self, kind: Hashable, expected: float) -> float:
        """The chance that a guess of this kind is kept if its parent is; `expected` [0, 1] is the first estimate."""
        met, kept = self._seen.get(kind, (0.0, 0.0))
        return (kept + self._trust * expected) / (met + self._trust)

    def learn(self, sketch: TreeBuilder, kinds: Sequence[Hashable], emitted: Sequence[int]) -> None:
        """From what became of a row's guesses, `kinds` [N] of them, when these tokens were emitted."""
        if not emitted:
            return
        path = sketch.path(emitted)
        at = {-1, *path}
        for node, (kind, parent) in enumerate(zip(kinds, sketch.parent, strict=True)):
            # Below the last token emitted nobody knows.
            if parent in at and (parent < 0 or parent != path[-1] or len(path) < len(emitted)):
                met, kept = self._seen.get(kind, (0.0, 0.0))
                self._seen[kind] = met * self._memory + 1, kept * self._memory + (node in at)
