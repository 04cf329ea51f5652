"""The target's states on their way to a trained draft, and a cache of what was made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from outrider.cache.base import Cache, Layout, UnboundedCache, WrappedCache
from outrider.core.types import Batch, Draft, Round, SharedWeights
from outrider.heads.description import HeadDescription

_PILE = 64  # rounds that may pass before their states are made one piece


class HiddenStates:
    """What was tapped of the target's pass, by slot and place in the text, until it is read.

    While nobody drafts, states only pile up; so to keep a round's costs next to nothing. How high they are is told by
    `piled`, for those who read them before they are too many.
    """

    def __init__(self, description: HeadDescription, tables: SharedWeights) -> None:
        self._description, self._tables = description, tables
        self.brief = False  # whether the states of the last round are all that will be asked for
        self._kept: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by slot: places, states [n, taps, H] from there

    def admit(self, slot: int) -> None:
        self._kept[slot] = []

    def record(self, round: Round) -> None:
        """Keep the states at each row's feed and accepted path."""
        layers = self._description.aux_states.layers
        for b, (row, path) in enumerate(zip(round.batch.seqs, round.path, strict=True)):
            kept = self._kept[row.slot]
            if self.brief:
                kept.clear()
            kept.append((round.batch.start[b], round.scores.states(layers, b, path)))
            if len(kept) >= _PILE:  # what is kept may be a view, and hold on to other rows' states
                kept[:] = [(kept[0][0], torch.cat([states for _, states in kept]))]

    def set_assumed(self, slot: int, start: int, count: int) -> None:
        """Zeros in place of states."""
        it, table = self._description, self._tables.embedding
        self._kept[slot] = [
            (start, torch.zeros(count, len(it.aux_states.layers), it.target_hidden, device=table.device))
        ]

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """States [end - begin, taps, H] of these places, none of which was forgotten."""
        found = self.tapped(slot, begin, end)
        if not self._description.aux_states.final or not len(found):
            return found
        last = normed(found[:, -1:], self._tables)
        return last if found.shape[1] == 1 else torch.cat([found[:, :-1], last], 1)

    def tapped(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """The same as the layers left them, before any norm."""
        parts = [
            states[max(begin - place, 0) : end - place]
            for place, states in self._kept[slot]
            if place < end and begin < place + len(states)
        ]
        if not parts:
            it = self._description
            return self._tables.embedding.new_zeros(0, len(it.aux_states.layers), it.target_hidden)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forget(self, slot: int, before: int) -> None:
        """States before this place will not be asked for any more."""
        kept = self._kept[slot]
        while len(kept) > 1 and kept[0][0] + len(kept[0][1]) <= before:
            del kept[0]
        if kept and (gone := min(before - kept[0][0], len(kept[0][1]))) >= _PILE:  # of what was made one piece
            place, states = kept[0]
            kept[0] = place + gone, states[gone:].clone()

    def piled(self, slot: int) -> int:
        """Places whose states wait to be read; none where only the last ever is."""
        return 0 if self.brief else sum(len(states) for _, states in self._kept.get(slot, ()))

    def bytes(self) -> int:
        return sum(states.nbytes for kept in self._kept.values() for _, states in kept)


class StateCache(WrappedCache):
    """Entries that were made with the target's own states, and these states until they are read."""

    def __init__(self, inner: Cache, taps: HiddenStates, *, read: Callable[[Batch], Batch], before: int = 0) -> None:
        """Keep entries in `inner` of what `read` leaves of a batch; `before` tokens of a text have none."""
        super().__init__(inner)
        self._taps, self._read, self._before = taps, read, before

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._taps.admit(slot)
        return self._inner.admit(slot, tokens)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self._read(batch), draft, first)

    def commit(self, round: Round) -> None:
        nothing = ((),) * len(round.batch.seqs)  # a guess has no state until the target has read it
        self._inner.commit(replace(round, batch=self._read(round.batch), path=nothing))
        for row in round.batch.seqs:
            self._taps.forget(row.slot, self._inner.length(row.slot))

    def release(self, slot: int) -> None:
        self._inner.release(slot)
        self._taps.admit(slot)

    def length(self, slot: int) -> int:
        held = self._inner.length(slot)
        return held + self._before if held else 0

    def set_prefix_caching(self, on: bool) -> None:
        pass  # the states of what is cached elsewhere are not known

    def bytes(self) -> int:
        return self._inner.bytes() + self._taps.bytes()


class NoCache(UnboundedCache):
    """Where nothing is kept of a text but the state before its end."""

    def __init__(self, taps: HiddenStates) -> None:
        self._taps, taps.brief = taps, True
        self._length: dict[int, int] = {}

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._taps.admit(slot)
        self._length[slot] = 0
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        raise NotImplementedError("there are no keys and values to stage")

    def commit(self, round: Round) -> None:
        for row, start, feed in zip(round.batch.seqs, round.batch.start, round.batch.feed, strict=True):
            self._length[row.slot] = start + len(feed)
            self._taps.forget(row.slot, start + len(feed) - 1)

    def release(self, slot: int) -> None:
        self.admit(slot, ())

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return self._taps.bytes()


def normed(states: torch.Tensor, tables: SharedWeights) -> torch.Tensor:
    """The target's final norm."""
    return functional.rms_norm(states.float(), tables.norm.shape, tables.norm.float(), tables.epsilon)
