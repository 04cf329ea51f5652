"""Retrieval: what followed this ending in a datastore of other texts (REST, He et al. 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import NamedTuple

from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.errors import OutriderError
from outrider.propose.acceptance import LEAST, AcceptanceEstimator
from outrider.propose.base import ProposerSetup, whole
from outrider.propose.lookup.datastore import LONGEST, SORTED, Datastore, fingerprint, vocabulary
from outrider.propose.tree_builder import TreeBuilder, picked

SHORTEST = 2  # tokens of an ending: one alone says too little of what comes next
_DOUBT = 40  # occurrences that speak against a guess beforehand, by the square of the matched length
_SAMPLES = 128  # occurrences looked at
_DEEPEST = SORTED - LONGEST  # guesses: so far those that continue alike stand side by side
_MANY = 4  # binary digits of a number of occurrences; from there on they prove alike
_STEPS = 8  # in which shares are told apart


class _Bud(NamedTuple):
    """A guess that may be added: how some occurrences go on after the guesses above it. The likeliest is the least."""

    fall: float  # minus the chance that it is kept
    serial: int  # of equally likely ones the earlier comes first
    token: int
    parent: int  # a node of the sketch
    depth: int  # 1 for a child of the root
    alike: range  # of the occurrences
    kind: Hashable


class RetrievalProposer:
    """Looks up the longest known ending of a text, and guesses what most often followed it.

    The continuations of its occurrences make a trie, whose likeliest nodes are the guesses. How likely a node is has
    been learned from guesses of its kind: that followed so long a match in such a share of so many occurrences. All
    rows share the datastore, which never changes, so no text reaches another row through it.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup, store: Datastore, *, shortest: int = SHORTEST) -> None:
        """Look up endings of `LONGEST` down to `shortest` tokens."""
        assert 1 <= shortest <= LONGEST
        self._device = setup.device
        self._store, self._shortest = store, shortest
        self._end = min(setup.vocab, store.separator)  # from this number on there are no tokens
        self._chances = AcceptanceEstimator()
        self._serial = count()
        self._open: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: this round's guesses and their kinds

    def admit(self, slot: int, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        rows = zip(batch.seqs, batch.draft_budget, strict=True)
        self._open = {row.slot: self._guess(row.token_ids, budget) for row, budget in rows}
        return picked([sketch for sketch, _ in self._open.values()], self._device)

    def commit(self, round: Round) -> None:
        for row, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if row.slot in self._open:
                self._chances.learn(*self._open[row.slot], emitted)

    def release(self, slot: int) -> None:
        self._open.pop(slot, None)

    def _guess(self, text: Sequence[int], budget: int) -> tuple[TreeBuilder, list[Hashable]]:
        """The likeliest nodes of the trie, the likeliest first, and their kinds."""
        sketch, kinds = TreeBuilder(), list[Hashable]()
        match = self._store.find(text, shortest=self._shortest, longest=LONGEST) if budget else None
        if not match:
            return sketch, kinds
        following = self._store.following(match, samples=_SAMPLES, depth=min(budget, _DEEPEST))
        root = _Bud(-1.0, 0, -1, -1, 0, range(len(following[0])), None)
        heap = [root]
        while heap and len(sketch.tokens) < budget:
            bud = heappop(heap)
            node = -1
            if bud is not root:
                node = sketch.add(bud.token, bud.parent, -bud.fall)
                kinds.append(bud.kind)
            if bud.depth < len(following):
                for child in self._sprout(bud, node, match.size, following[bud.depth], budget):
                    heappush(heap, child)
        return sketch, kinds

    def _sprout(self, bud: _Bud, node: int, size: int, column: list[int], most: int) -> Iterator[_Bud]:
        """What most often comes next where the occurrences are alike up to `bud`, which is `node` of the sketch."""
        whole, depth = len(bud.alike), bud.depth + 1
        length, digits = min(size + bud.depth, LONGEST), min(whole.bit_length(), _MANY)
        times = Counter(column[bud.alike.start : bud.alike.stop])
        starts = accumulate(times.values(), initial=bud.alike.start)
        groups = sorted(zip(times.items(), starts, strict=False), key=_frequency)
        for (token, often), start in groups[:most]:
            if token < self._end:
                kind = length, digits, often * _STEPS // whole
                chance = self._chances.of(kind, often / (whole + _DOUBT / length**2))
                if bud.fall * chance <= -LEAST:
                    serial = next(self._serial)
                    yield _Bud(bud.fall * chance, serial, token, node, depth, range(start, start + often), kind)


def retrieval_proposer(argument: str, setup: ProposerSetup) -> RetrievalProposer:
    """`retrieval:DIR`, or `retrieval:DIR:MIN` for endings of MIN tokens or more.

    Raises:
        OutriderError: there is no datastore of the target's tokens.
    """
    store, folder, shortest = open_store(argument)
    if store.header.tokenizer != fingerprint(setup.tokenizer):
        raise OutriderError(
            f"the datastore in {folder} was made with another tokenizer than the target's ({store.header.vocab} and"
            f" {vocabulary(setup.tokenizer)} ids); build it again with outrider index, and name this target there"
        )
    return RetrievalProposer(setup, store, shortest=shortest)


def open_store(argument: str) -> tuple[Datastore, str, int]:
    """A datastore, its folder, and the tokens of the shortest ending to look up.

    Raises:
        OutriderError: no folder with a datastore is named, or endings that are out of range.
    """
    folder, _, number = argument.rpartition(":")
    if not folder or not number.isdecimal():
        folder, number = argument, ""
    if not folder:
        raise OutriderError("retrieval needs the folder of a datastore; write retrieval:DIR")
    shortest = (whole(number) or 0) if number else SHORTEST
    if not 1 <= shortest <= LONGEST:
        raise OutriderError(f"retrieval of endings of {shortest} tokens is out of range; use 1 to {LONGEST}")
    return Datastore.open(folder), folder, shortest


def _frequency(group: tuple[tuple[int, int], int]) -> int:
    """For the commonest to come first; of equals the one that came first stays so."""
    (_, often), _ = group
    return -often
