"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023; Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from outrider.propose.base import Setup
from outrider.propose.chances import Chances
from outrider.propose.sketch import Sketch, picked
from outrider.types import Batch, Draft, Needs, Request, Round

_WAYS = 3  # to go on
_DEEP = 4  # from this guess on they fare alike
_LEAST = 0.08  # the chance below which a guess is worth its place nowhere


class _Index:
    """One row's text, and for each n-gram in it where what followed it begins: the latest place of each next token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        at = len(self._text)
        for size in self._sizes:
            if size <= at:
                before = self._after.setdefault(tuple(self._text[at - size :]), [])
                before[:] = [at, *(place for place in before if self._text[place] != token)][:_WAYS]
        self._text.append(token)

    def ways(self, count: int) -> Iterator[tuple[int, Iterator[int]]]:
        """How long a known ending is, and the `count` tokens behind it; the longest and latest come first."""
        met = set[int]()
        for size in self._sizes:
            if size > len(self._text):
                continue
            for at in self._after.get(tuple(self._text[-size:]), ()):
                if at not in met:
                    met.add(at)
                    yield size, self._copy(at, count)

    def _copy(self, at: int, count: int) -> Iterator[int]:
        """What stands there; the text repeats itself at its end."""
        period = len(self._text) - at
        return (self._text[at + i % period] for i in range(count))


class _Growth:
    """A row's guesses, and what kind each of them is."""

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._sketch, self._kinds = Sketch(), list[Hashable]()
        self._below: dict[tuple[int, int], int] = {}  # by parent and token
        self._ways = 0  # that have parted from those before them

    def add(self, size: int, tokens: Iterator[int]) -> bool:
        """Another way to go on, as far as it is likely to be followed; returns whether there is room for more."""
        at, parted, chance = -1, False, 1.0
        for depth, token in enumerate(tokens):
            known = self._below.get((at, token))
            if known is None:
                kind = size, self._ways, parted, min(depth, _DEEP)
                expected = size / (size + 1) * (0.5 if self._ways and not parted else 1)
                chance *= self._chances.of(kind, expected)
                if chance < _LEAST:
                    break
                known = self._below[at, token] = self._sketch.add(token, at, chance)
                self._kinds.append(kind)
                parted = True
            at, chance = known, self._sketch.chance[known]
        self._ways += parted
        return self._ways < _WAYS

    def best(self, count: int) -> tuple[Sketch, list[Hashable]]:
        """The likeliest `count` of them; a parent is never less likely than its children, and came before them."""
        grown, out = self._sketch, Sketch()
        order = sorted(range(len(self._kinds)), key=lambda node: -grown.chance[node])[:count]
        place = {-1: -1}
        for node in order:
            place[node] = out.add(grown.tokens[node], place[grown.parent[node]], grown.chance[node])
        return out, [self._kinds[node] for node in order]


class NgramProposer:
    """Copies what followed where the text ended like this before, the longest and latest first: up to three ways."""

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
        growth = _Growth(self._chances)
        for size, tokens in self._indexes[slot].ways(budget) if budget else ():
            if not growth.add(size, tokens):
                break
        self._open[slot] = growth.best(budget)
        return self._open[slot][0]
