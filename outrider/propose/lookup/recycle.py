"""Token recycling: what the target once thought likely to follow is guessed again (Luo et al. 2024).

A pass scores every guess, kept or not, and so tells for free what may follow it. That is remembered under the last
tokens of the guess's path, and a tree grows from it, the likeliest guess first. The paper's table knows single tokens,
fills a fixed tree, and is carried from request to request. Here longer endings come first, the prompt is read as well,
unknown tokens borrow from their rivals, chances are learned, and rows share nothing but those chances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from math import exp
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.propose.acceptance import AcceptanceEstimator
from outrider.propose.base import ProposerSetup
from outrider.propose.tree_builder import TreeBuilder, picked

_BREADTH = 8  # successors remembered of one ending
_LONGEST = 4  # tokens of an ending
_SIZES = range(_LONGEST, 0, -1)
_USUAL, _KIN = 0, _LONGEST + 1  # sources of guesses beside endings of 1 to _LONGEST tokens
_FAITH = (0.2, 0.4, 0.6, 0.8, 0.85, 0.6)  # first estimates, by source: how often what was likeliest comes true
_STEP = 1.5  # how many times e one level is likelier than the next
_EVEN = 4  # the level of what is as likely as its strongest rival; there are as many above it and below
_TEXT = 2 * _EVEN + 1  # the level of what was read in a prompt
_KINDS = _BREADTH * (_TEXT + 1)  # of guesses from one source
_ROOM = 1 << 16  # endings remembered of a row


class _Seen(NamedTuple):  # dozens are made a round, and a frozen dataclass takes four times as long to make
    """What may follow an ending, likeliest first."""

    tokens: Sequence[int]
    scores: Sequence[float] | None  # logits; None where it was read in the prompt, the latest first

    def kind(self, source: int, rank: int) -> int:
        """What tells good guesses from bad ones: where they come from, and how sure the target was."""
        if self.scores is None:
            level = _TEXT
        else:
            ahead = (self.scores[rank] - self.scores[not rank]) / _STEP
            level = _EVEN + round(max(min(ahead, _EVEN), -_EVEN))
        return source * _KINDS + level * _BREADTH + rank


class _Memory:
    """One row's endings, and what was seen to follow them."""

    def __init__(self, prompt: int) -> None:
        """Read the first `prompt` tokens of a text, as they come; what follows the others is seen in scores."""
        self._prompt, self._next = prompt, 1
        self._after: dict[tuple[int, ...], _Seen] = {}
        self._often: Counter[int] = Counter()
        self._usual: _Seen | None = None  # until more is said

    def read(self, text: Sequence[int], end: int) -> None:
        """As much of the prompt as stands before `end` in the text."""
        stop = min(end, self._prompt)
        for at in range(self._next, stop):
            self._read(tuple(text[max(at - _LONGEST, 0) : at]), text[at])
        self._next = max(self._next, stop)

    def emit(self, tokens: Sequence[int]) -> None:
        """The row says these."""
        self._often.update(tokens)
        self._usual = None

    def put(self, ending: tuple[int, ...], seen: _Seen) -> None:
        """Remember what was last seen to follow, under the ending's last token, its last two, and so on."""
        for size in range(1, len(ending) + 1):
            self._after[ending[-size:]] = seen
        if len(self._after) > _ROOM:
            for old in list(islice(self._after, _ROOM // 4)):
                del self._after[old]

    def guesses(self, ending: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Tokens that may follow, and the kinds of these guesses, likely ones first."""
        size, seen = self._find(ending)
        sources = [(size, seen)]
        if size < 2:
            sources.append((_KIN, self._kin(ending)))
        if not size:
            sources.append((_USUAL, self._said_most()))
        done: set[int] = set()
        for source, known in sources:
            if known is None:
                continue
            for rank, token in enumerate(known.tokens):
                if token not in done:
                    done.add(token)
                    yield token, known.kind(source, rank)

    def _find(self, ending: tuple[int, ...]) -> tuple[int, _Seen | None]:
        """What follows the longest part of an ending that is known, and how long that is."""
        for size in _SIZES:
            seen = self._after.get(ending[-size:])
            if seen is not None:
                return min(size, len(ending)), seen
        return 0, None

    def _kin(self, ending: tuple[int, ...]) -> _Seen | None:
        """What follows another token in place of the last one: the likeliest that was scored in this very place.

        It was a guess in the pass before, and has been scored although it was not kept.
        """
        _, rivals = self._find(ending[:-1])
        before = ending[-_LONGEST:-1]
        for token in rivals.tokens if rivals else ():
            seen = self._after.get((*before, token))
            if seen is not None and token != ending[-1]:
                return seen
        return None

    def _said_most(self) -> _Seen:
        if self._usual is None:
            self._usual = _Seen([token for token, _ in self._often.most_common(_BREADTH)], None)
        return self._usual

    def _read(self, ending: tuple[int, ...], token: int) -> None:
        for size in range(1, len(ending) + 1):
            old = self._after.get(ending[-size:])
            others = [other for other in old.tokens if other != token] if old else []
            self._after[ending[-size:]] = _Seen([token, *others[: _BREADTH - 1]], None)


class RecycleProposer:
    """Grows a tree, best first, from what the target's scores have shown of endings like those of its nodes.

    A prompt is read in the rounds in which the target reads it, so that no long one holds up those who decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup) -> None:
        self._device = setup.device
        self._memories: dict[int, _Memory] = {}
        self._chances = AcceptanceEstimator()
        self._known: dict[int, float] = {}  # chances by kind, until more is learned
        self._open: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: this round's guesses and their kinds

    def admit(self, slot: int, request: Request) -> None:
        self._memories[slot] = _Memory(len(request.prompt_token_ids))

    def propose(self, batch: Batch) -> Draft:
        self._open = {}
        for row, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True):
            self._memories[row.slot].read(row.token_ids, start + len(feed))
        sketches = [
            self._sketch(row, budget, batch.min_path_prob)
            for row, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        return picked(sketches, self._device)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if row.slot in self._open:
                self._chances.learn(*self._open[row.slot], emitted)
            self._memories[row.slot].emit(emitted)
        self._known = {}
        self._remember(round)

    def release(self, slot: int) -> None:
        self._memories.pop(slot, None)

    def _sketch(self, row: SequenceState, budget: int, keep: float) -> TreeBuilder:
        sketch = TreeBuilder()
        kinds: list[Hashable] = []
        self._open[row.slot] = sketch, kinds
        if not budget:
            return sketch
        memory, order = self._memories[row.slot], count()
        queue: list[tuple[float, int, int, int, _Place]] = []  # of each place the best guess that was not made yet

        def wait(place: _Place, most: float) -> None:
            token, kind = next(place.guesses, (-1, -1))
            if kind >= 0:
                chance = min(place.chance * self._chance(kind), most)
                heappush(queue, (-chance, next(order), token, kind, place))

        ending = tuple(row.token_ids[-_LONGEST - 1 :])
        wait(_Place(-1, 1.0, ending, memory.guesses(ending)), 1.0)
        while queue and len(kinds) < budget and -queue[0][0] >= keep:
            negative, _, token, kind, place = heappop(queue)
            node = sketch.add(token, place.node, -negative)
            kinds.append(kind)
            wait(place, -negative)
            if len(kinds) < budget:
                ending = (*place.ending[-_LONGEST:], token)
                wait(_Place(node, -negative, ending, memory.guesses(ending)), -negative)
        return sketch

    def _chance(self, kind: int) -> float:
        """That a guess of this kind is kept if its parent is."""
        chance = self._known.get(kind)
        if chance is None:
            chance = self._known[kind] = self._chances.of(kind, _expected(kind))
        return chance

    def _remember(self, round: Round) -> None:
        """What may follow each node that was scored, in one copy from the device."""
        size = 1 + round.draft.size
        rows = [b for b, emitted in enumerate(round.emitted) if emitted]
        where = [b * size + node for b in rows for node in range(1 + round.draft.width[b])]
        if not where:
            return
        logits = round.scores.logits.flatten(0, 1)
        if len(where) < len(logits):
            logits = logits[tree.upload(where, logits.device)]
        best, ids = logits.topk(min(_BREADTH, logits.shape[1]))
        # Ids are far below 2**24, so float32 carries them exactly beside the logits.
        parts = (best, ids, round.draft.tokens, round.draft.parent)
        host = iter(torch.cat([part.flatten() for part in parts]).tolist())
        scores, successors, tokens, parents = (list(islice(host, part.numel())) for part in parts)
        successors, breadth = list(map(int, successors)), ids.shape[1]
        tokens, parents = list(map(int, tokens)), list(map(int, parents))
        begins = iter(range(0, len(scores), breadth))
        for b in rows:
            memory, first = self._memories[round.batch.seqs[b].slot], b * (size - 1)
            endings = [tuple(round.batch.seqs[b].token_ids[-_LONGEST:])]
            for node in range(first, first + round.draft.width[b]):
                endings.append((*endings[parents[node] + 1][1 - _LONGEST :], tokens[node]))
            for ending, at in zip(endings, begins, strict=False):
                memory.put(ending, _Seen(successors[at : at + breadth], scores[at : at + breadth]))


class _Place(NamedTuple):
    """Where a growing tree may go on."""

    node: int
    chance: float
    ending: tuple[int, ...]
    guesses: Iterator[tuple[int, int]]  # tokens and kinds that were not tried yet


def _expected(kind: int) -> float:
    """The chance of a guess of a kind that was never met."""
    source, code = divmod(kind, _KINDS)
    level, rank = divmod(code, _BREADTH)
    if level == _TEXT:
        return _FAITH[source] / (1 + rank)
    return _FAITH[source] / (1 + exp((_EVEN - level) * _STEP))
