"""States that cannot be trimmed: kept by snapshot and replay.

A recurrent state has read all it was fed and forgets nothing, so there is no way back from a rejected guess. The
committed state is therefore never fed guesses: a pass works on a copy, and commit either adopts the copy, when all
it read was kept, or replays the kept tokens on the committed state. Any state that can be copied and advanced fits;
which models are let in is up to `load`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.cache.base import Layout, UnboundedCache, lay_out
from outrider.core.types import Batch, Draft, Round

State = Any  # the model library's own cache object of one row


class RecurrentCache(UnboundedCache):
    """One state per slot."""

    def __init__(
        self,
        *,
        slots: int,
        device: torch.device,
        fresh: Callable[[], State],
        advance: Callable[[State, torch.Tensor], torch.Tensor],
    ) -> None:
        """Keep states made by `fresh`; `advance(state, tokens [T])` feeds one in place and returns logits [T, V]."""
        self.device = device
        self._fresh, self._advance = fresh, advance
        self._states: list[State | None] = [None] * slots
        self._length = [0] * slots
        self._read: dict[int, tuple[State, int]] = {}  # by slot: a copy, and how many guesses of a chain it has read

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._states[slot], self._length[slot] = self._fresh(), 0
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        assert first < 0, "a recurrent draft cannot be grown node by node"
        self._read.clear()
        return lay_out(batch, draft, first, self.device)

    def read(self, slot: int, tokens: torch.Tensor, guesses: int) -> torch.Tensor:
        """Logits [T, V] of `tokens` [T] read by a copy of the slot's state; the last `guesses` of them are a chain."""
        state = copy.deepcopy(self._states[slot])
        logits = self._advance(state, tokens)
        self._read[slot] = (state, guesses)
        return logits

    def commit(self, round: Round) -> None:
        for b, (row, feed, path) in enumerate(zip(round.batch.seqs, round.batch.feed, round.path, strict=True)):
            state, guesses = self._read[row.slot]
            if guesses == len(path) and path == tuple(range(guesses)):
                self._states[row.slot] = state
            else:
                kept = round.draft.tokens[b, list(path)]
                self._advance(self._states[row.slot], torch.cat([torch.tensor(feed, device=self.device), kept]))
            self._length[row.slot] += len(feed) + len(path)
        self._read.clear()

    def release(self, slot: int) -> None:
        self._states[slot], self._length[slot] = None, 0

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return sum(_bytes(state) for state in self._states if state is not None)


def _bytes(state: State) -> int:
    """Bytes of all tensors that a cache object's layers hold."""
    total, queue = 0, [vars(layer) for layer in getattr(state, "layers", [])]
    while queue:
        for value in queue.pop().values():
            if isinstance(value, torch.Tensor):
                total += value.nbytes
            elif isinstance(value, dict):
                queue.append(value)
    return total
