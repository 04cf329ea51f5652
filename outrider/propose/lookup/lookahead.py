"""Lookahead decoding: the target itself writes the n-grams that are guessed later (Fu et al. 2024).

Riders are guesses about what comes a few tokens on. They are scored beside the guesses that may be kept, and what the
target says after them, a step of Jacobi iteration, makes n-grams. These wait in a pool until the text reaches their
first token.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.errors import OutriderError
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import ProposerSetup, whole
from outrider.propose.tree_builder import TreeBuilder, picked

_HOPE = 0.4  # that a guess from the pool is kept, before any was seen
_ROOM = 1 << 15  # tokens for which the pool has n-grams
_WORTH = 0.2  # what a rider is believed to earn, before any did
_TRUST = 64.0  # that counts as so many riders
_MEMORY = 0.995  # weight of a round one round later
_MOST = (256, 32, 64)  # of W, N and G: a round's work on the host grows with each of them

Column = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """W, N and G of the paper."""

    window: int = 10  # columns of riders
    size: int = 3  # tokens of an n-gram; a column has one less
    guesses: int = 8  # n-grams kept for a token


class _Pool:
    """One row's n-grams by their first token, the latest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[int, list[Column]] = {}

    def add(self, ngram: Column) -> None:
        first, rest = ngram[0], ngram[1:]
        others = [other for other in self._after.pop(first, ()) if other != rest]
        self._after[first] = [rest, *others[: self._most - 1]]
        if len(self._after) > _ROOM:
            for old in list(islice(self._after, _ROOM // 4)):
                del self._after[old]

    def after(self, token: int) -> list[Column]:
        return self._after.get(token, [])


@dataclass(slots=True)
class _State:
    """One row's pool and window. A column is one place's guess and how the n-gram that begins there may go on."""

    pool: _Pool
    chance: random.Random
    columns: list[Column] = field(default_factory=list)

    def widen(self, width: int, size: int, text: Sequence[int]) -> None:
        """Take so many columns; new ones hold what the text said at random places."""
        del self.columns[width:]
        while len(self.columns) < width:
            self.columns.append(tuple(self.chance.choices(text, k=size)))

    def paths(self) -> list[Column]:
        """Of each column the tokens from the root down to its last rider."""
        firsts = tuple(column[0] for column in self.columns)
        return [firsts[:j] + column for j, column in enumerate(self.columns)]

    def move(self, said: Sequence[int | None], text: Sequence[int], emitted: int) -> None:
        """A step of Jacobi iteration: each column goes on by what the target said after it, as far as the text did."""
        moved = []
        for column, token in zip(self.columns, said, strict=True):
            if token is None:  # its riders were left out
                token = self.chance.choice(text)
            else:
                self.pool.add((*column, token))
            moved.append((*column[1:], token))
        self.columns = moved[emitted - 1 :]


def lookahead_proposer(argument: str, setup: ProposerSetup) -> LookaheadProposer:
    """Of the shape that is written WxNxG."""
    return LookaheadProposer(setup, read_shape(argument))


def read_shape(argument: str) -> Sizes:
    """The shape that is written WxNxG; the usual one of nothing.

    Raises:
        OutriderError: it is no such shape.
    """
    if not argument:
        return Sizes()
    sizes = [whole(size) or 0 for size in argument.split("x")]
    if len(sizes) != 3 or min(sizes) < 1 or sizes[1] < 2 or any(s > m for s, m in zip(sizes, _MOST, strict=True)):
        raise OutriderError(
            f"lookahead:{argument} is no shape; write lookahead:10x3x8 for 10 columns of riders, n-grams of 3 tokens"
            f" (2 at least), and 8 of them kept for a token; {'x'.join(map(str, _MOST))} at most"
        )
    return Sizes(window=sizes[0], size=sizes[1], guesses=sizes[2])


class LookaheadProposer:
    """Guesses n-grams of the pool, and lets riders write new ones.

    Nobody expects a rider to be kept, but all that is kept was once written by riders. So a rider's chance is what one
    has earned so far: guesses that came true for each rider scored. A planner weighs it as it weighs any guess, and
    where riders are left out their few successors earn more, until they are let in again.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, shape: Sizes | None = None) -> None:
        """Ride as `shape` says, or in fewer columns where the budget is smaller: half of it is the riders' own."""
        self._device, self._shape = setup.device, shape or Sizes()
        self._states: dict[int, _State] = {}
        self._chances = AcceptanceEstimator()
        self._earned, self._ridden = 0.0, 0.0  # decayed counts: guesses that came true, and riders that were scored
        self._open: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: guesses of the pool and their kinds
        self._whole: dict[int, TreeBuilder] = {}  # by slot: those and the riders

    def admit(self, slot: int, request: Request) -> None:
        self._states[slot] = _State(_Pool(self._shape.guesses), random.Random(request.seed))

    def propose(self, batch: Batch) -> Draft:
        self._open, self._whole = {}, {}
        sketches = [self._sketch(row, budget) for row, budget in zip(batch.seqs, batch.draft_budget, strict=True)]
        return picked(sketches, self._device)

    def commit(self, round: Round) -> None:
        self._earned, self._ridden = self._earned * _MEMORY, self._ridden * _MEMORY
        host = _read(round)
        for b, (row, emitted) in enumerate(zip(round.batch.seqs, round.emitted, strict=True)):
            if not emitted or row.slot not in self._open:
                continue
            self._chances.learn(*self._open[row.slot], emitted)
            self._earned += len(self._whole[row.slot].path(emitted))
            state = self._states[row.slot]
            said = _said(state.paths(), *host[b])
            self._ridden += sum(
                len(column) for column, token in zip(state.columns, said, strict=True) if token is not None
            )
            state.move(said, row.token_ids, len(emitted))

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def _sketch(self, row: SequenceState, budget: int) -> TreeBuilder:
        state, riders = self._states[row.slot], self._shape.size - 1
        known, kinds = self._guesses(state.pool.after(row.token_ids[-1]) if budget else ())
        width = min(self._shape.window, max(budget - len(kinds), budget // 2) // riders)
        room = budget - width * riders
        known = TreeBuilder(known.tokens[:room], known.parent[:room], known.accept_prob[:room])
        self._open[row.slot] = known, kinds[:room]
        state.widen(width, riders, row.token_ids)
        whole = self._whole[row.slot] = self._with_riders(known, state.paths())
        return whole

    def _guesses(self, ngrams: Sequence[Column]) -> tuple[TreeBuilder, list[Hashable]]:
        """The tree of some n-grams, and the kinds of its guesses: how deep they are, and how many n-grams are newer."""
        sketch = TreeBuilder()
        kinds: list[Hashable] = []
        for age, ngram in enumerate(ngrams):
            chances: list[float] = []
            for depth in range(len(ngram)):
                above = chances[-1] if chances else 1.0
                chances.append(above * self._chances.of((depth, age), _HOPE))
            new = _grow(sketch, ngram, chances)
            kinds += [(depth, age) for depth in range(len(ngram) - new, len(ngram))]
        ordered, order = _ordered(sketch)
        return ordered, [kinds[node] for node in order]

    def _with_riders(self, known: TreeBuilder, paths: Sequence[Column]) -> TreeBuilder:
        sketch = TreeBuilder(known.tokens[:], known.parent[:], known.accept_prob[:])
        worth = self._worth()
        for path in paths:
            _grow(sketch, path, [worth] * len(path))
        return _ordered(sketch)[0]

    def _worth(self) -> float:
        """Guesses that came true for each rider scored."""
        return min((self._earned + _TRUST * _WORTH) / (self._ridden + _TRUST), 1.0)


def _grow(sketch: TreeBuilder, path: Sequence[int], chances: Sequence[float]) -> int:
    """Add a path below the root, as far as it is not there yet; returns how many guesses that takes."""
    known = {pair: node for node, pair in enumerate(zip(sketch.parent, sketch.tokens, strict=True))}
    before, at = len(sketch.tokens), -1
    for token, chance in zip(path, chances, strict=True):
        twin = known.get((at, token))
        at = sketch.add(token, at, min(chance, sketch.accept_prob[at] if at >= 0 else 1.0)) if twin is None else twin
    return len(sketch.tokens) - before


def _ordered(sketch: TreeBuilder) -> tuple[TreeBuilder, list[int]]:
    """The same tree with likelier guesses first, and where its nodes were before."""
    order = sorted(
        range(len(sketch.tokens)), key=lambda node: -sketch.accept_prob[node]
    )  # parents stay first: they came first
    home = {-1: -1} | {node: at for at, node in enumerate(order)}
    out = TreeBuilder(
        [sketch.tokens[node] for node in order],
        [home[sketch.parent[node]] for node in order],
        [sketch.accept_prob[node] for node in order],
    )
    return out, order


def _read(round: Round) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each row the likeliest token at the root and after each node, and the nodes' tokens and parents: one copy."""
    best = round.scores.best if round.scores.best is not None else round.scores.logits.argmax(-1)
    size = round.draft.size
    host = torch.cat([best, round.draft.tokens, round.draft.parent], 1).tolist()
    return [
        (row[: 1 + width], row[1 + size : 1 + size + width], row[1 + 2 * size : 1 + 2 * size + width])
        for row, width in zip(host, round.draft.width, strict=True)
    ]


def _said(
    paths: Sequence[Column], best: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> list[int | None]:
    """What the target said after each path, None where it was not asked."""
    children = {pair: node for node, pair in reversed(list(enumerate(zip(parents, tokens, strict=True))))}
    said: list[int | None] = []
    for path in paths:
        at: int | None = -1
        for token in path:
            at = None if at is None else children.get((at, token))
        said.append(None if at is None else best[1 + at])
    return said
