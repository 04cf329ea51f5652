"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023; Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from outrider import tree
from outrider.propose.base import Setup
from outrider.types import Batch, Draft, Needs, Request, Round

_REACH: Mapping[int, int] = MappingProxyType({1: 3, 2: 6})  # guesses that a match of so few tokens is good for


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

    def guess(self, count: int) -> list[int]:
        """What followed the longest known ending, further for a longer one; it repeats itself at the end."""
        for size in self._sizes:
            at = self._after.get(tuple(self._text[-size:])) if size <= len(self._text) else None
            if at is not None:
                period = len(self._text) - at
                return [self._text[at + i % period] for i in range(min(count, _REACH.get(size, count)))]
        return []


class NgramProposer:
    """Copies the continuation of the latest earlier occurrence of the text's ending, the longest one first."""

    needs = Needs()

    def __init__(self, setup: Setup, *, shortest: int = 1, longest: int = 5) -> None:
        """Look up endings of `longest` down to `shortest` tokens."""
        self._device = setup.device
        self._sizes = (shortest, longest)
        self._indexes: dict[int, _Index] = {}

    def admit(self, slot: int, request: Request) -> None:
        self._indexes[slot] = _Index(*self._sizes)
        for token in request.prompt:
            self._indexes[slot].append(token)

    def propose(self, batch: Batch) -> Draft:
        guesses = [
            self._indexes[row.slot].guess(budget) if budget else []
            for row, budget in zip(batch.rows, batch.budget, strict=True)
        ]
        width = tuple(len(guess) for guess in guesses)
        size = max(width)
        if not size:
            return tree.empty(len(guesses), self._device)
        padded = [guess + [0] * (size - len(guess)) for guess in guesses]
        return tree.chain(tree.upload(padded, self._device), width)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.rows, round.emitted, strict=True):
            for token in emitted:
                self._indexes[row.slot].append(token)

    def release(self, slot: int) -> None:
        self._indexes.pop(slot, None)
