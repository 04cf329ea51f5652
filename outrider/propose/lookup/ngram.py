"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023; Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import ProposerSetup
from outrider.propose.tree_builder import TreeBuilder, picked

_WAYS = 3  # to go on
_KEPT = 5  # places behind an n-gram, each with another token
_GAPS = (1, 2, 3)  # tokens at the text's end that are put in the place of as many others
_CUE = 3  # longest n-gram before a gap
_DEEP = 4  # from this guess on they fare alike
_LEAST = 0.08  # the chance below which a guess is worth its place nowhere

_Kind = tuple[int, int, int]  # tokens that agree, tokens since, and how many ways an ending without a gap went on


class _Index:
    """One row's text, and for each n-gram in it where what followed it begins: the latest place of each next token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens read so far."""
        return len(self._text)

    def append(self, token: int) -> None:
        at = len(self._text)
        for size in self._sizes:
            if size <= at:
                before = self._after.setdefault(tuple(self._text[at - size :]), [])
                before[:] = [at, *(place for place in before if self._text[place] != token)][:_KEPT]
        self._text.append(token)

    def ways(self, count: int) -> Iterator[tuple[_Kind, float, Iterator[int]]]:
        """Each way to go on: its kind, a first estimate of its chance, and `count` tokens; better ones come first."""
        met = set[int]()
        for gap in (0, *_GAPS):
            for size, places in self._endings(gap):
                kind = size, gap, 0 if gap else len(places)
                expected = size / (size + 1) / (2 if gap else 1)
                for at in (place + gap for place in places):
                    if at < len(self._text) and at not in met:
                        met.add(at)
                        yield kind, expected, self._copy(at, count)

    def _endings(self, gap: int) -> Iterator[tuple[int, list[int]]]:
        """Sizes of the n-grams `gap` tokens before the end, and where what followed them begins."""
        end = len(self._text) - gap
        for size in self._sizes:
            if size <= min(end, _CUE if gap else end):
                places = self._after.get(tuple(self._text[end - size : end]))
                if places:
                    yield size, places

    def _copy(self, at: int, count: int) -> Iterator[int]:
        """What stands there; the text repeats itself at its end."""
        period = len(self._text) - at
        return (self._text[at + i % period] for i in range(count))


class _Growth:
    """A row's guesses, and what kind each of them is."""

    def __init__(self, chances: AcceptanceEstimator) -> None:
        self._chances = chances
        self._sketch, self._kinds = TreeBuilder(), list[Hashable]()
        self._below: dict[tuple[int, int], int] = {}  # by parent and token
        self._ways = 0  # that have parted from those before them

    def add(self, way: _Kind, expected: float, tokens: Iterator[int]) -> bool:
        """Another way to go on, as far as it is likely to be followed; returns whether there is room for more."""
        at, parted, chance = -1, False, 1.0
        for depth, token in enumerate(tokens):
            known = self._below.get((at, token))
            if known is None:
                kind = way, self._ways, parted, min(depth, _DEEP)
                chance *= self._chances.of(kind, expected * (0.5 if self._ways and not parted else 1))
                if chance < _LEAST:
                    break
                known = self._below[at, token] = self._sketch.add(token, at, chance)
                self._kinds.append(kind)
                parted = True
            at, chance = known, self._sketch.accept_prob[known]
        self._ways += parted
        return self._ways < _WAYS

    def best(self, count: int) -> tuple[TreeBuilder, list[Hashable]]:
        """The likeliest `count` of them; a parent is never less likely than its children, and came before them."""
        grown, out = self._sketch, TreeBuilder()
        order = sorted(range(len(self._kinds)), key=lambda node: -grown.accept_prob[node])[:count]
        place = {-1: -1}
        for node in order:
            place[node] = out.add(grown.tokens[node], place[grown.parent[node]], grown.accept_prob[node])
        return out, [self._kinds[node] for node in order]


class NgramProposer:
    """Copies what followed where the text ended like this before, the longest and latest first: up to three ways.

    A text is read in the rounds in which the target reads it, so that no long prompt holds up those who decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, *, shortest: int = 1, longest: int = 5) -> None:
        """Look up endings of `longest` down to `shortest` tokens."""
        self._device = setup.device
        self._sizes = (shortest, longest)
        self._indexes: dict[int, _Index] = {}
        self._chances = AcceptanceEstimator()
        self._open: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: this round's guesses and their kinds

    def admit(self, slot: int, request: Request) -> None:
        self._indexes[slot] = _Index(*self._sizes)

    def propose(self, batch: Batch) -> Draft:
        self._open = {}
        for row, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True):
            index = self._indexes[row.slot]
            for token in row.token_ids[len(index) : start + len(feed)]:
                index.append(token)
        sketches = [self._sketch(row.slot, budget) for row, budget in zip(batch.seqs, batch.draft_budget, strict=True)]
        return picked(sketches, self._device)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if row.slot in self._open:
                self._chances.learn(*self._open[row.slot], emitted)

    def release(self, slot: int) -> None:
        self._indexes.pop(slot, None)

    def _sketch(self, slot: int, budget: int) -> TreeBuilder:
        growth = _Growth(self._chances)
        for way in self._indexes[slot].ways(budget) if budget else ():
            if not growth.add(*way):
                break
        self._open[slot] = growth.best(budget)
        return self._open[slot][0]
