"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023; Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate
from operator import mul
from types import MappingProxyType

from outrider.propose.base import Setup
from outrider.propose.chances import Chances
from outrider.propose.sketch import Sketch, picked
from outrider.types import Batch, Draft, Needs, Request, Round

_REACH: Mapping[int, int] = MappingProxyType({1: 3, 2: 6})  # guesses that a match of so few tokens is good for
_DEEP = 4  # from this guess on they fare alike


class _Index:
    """One row's text, and for each n-gram in it where its latest continuation begins."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        at = len(self._text)
        for size in self._sizes:
            if size <= at:
                self._after[tuple(self._text[at - size :])] = at
        self._text.append(token)

    def guess(self, count: int) -> tuple[list[int], int]:
        """What followed the longest known ending, and how long that is; the text repeats itself at its end."""
        for size in self._sizes:
            at = self._after.get(tuple(self._text[-size:])) if size <= len(self._text) else None
            if at is not None:
                period = len(self._text) - at
                return [self._text[at + i % period] for i in range(min(count, _REACH.get(size, count)))], size
        return [], 0


class NgramProposer:
    """Copies the continuation of the latest earlier occurrence of the text's ending, the longest one first."""

    needs = Needs()

    def __init__(self, setup: Setup, *, shortest: int = 1, longest: int = 5) -> None:
        """Look up endings of `longest` down to `shortest` tokens."""
        self._device = setup.device
        self._sizes = (shortest, longest)
        self._indexes: dict[int, _Index] = {}
        self._chances = Chances()
        self._open: dict[int, tuple[Sketch, list[Hashable]]] = {}  # by slot: this round's guesses and their kinds

    def admit(self, slot: int, request: Request) -> None:
        self._indexes[slot] = _Index(*self._sizes)
        for token in request.prompt:
            self._indexes[slot].append(token)

    def propose(self, batch: Batch) -> Draft:
        self._open = {}
        sketches = [self._sketch(row.slot, budget) for row, budget in zip(batch.rows, batch.budget, strict=True)]
        return picked(sketches, self._device)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.rows, round.emitted, strict=True):
            if row.slot in self._open:
                self._chances.learn(*self._open[row.slot], emitted)
            for token in emitted:
                self._indexes[row.slot].append(token)

    def release(self, slot: int) -> None:
        self._indexes.pop(slot, None)

    def _sketch(self, slot: int, budget: int) -> Sketch:
        """A chain whose chances are those of matches so long and guesses so deep."""
        tokens, size = self._indexes[slot].guess(budget) if budget else ([], 0)
        kinds: list[Hashable] = [(size, min(i, _DEEP)) for i in range(len(tokens))]
        each = (self._chances.of(kind, size / (size + 1)) for kind in kinds)
        sketch = Sketch(tokens, list(range(-1, len(tokens) - 1)), list(accumulate(each, mul)))
        self._open[slot] = sketch, kinds
        return sketch
