"""The cache of recurrent states, with snapshot and replay.

A recurrent state cannot be trimmed, so rejected draft tokens cannot be removed from it. The committed state is
therefore never advanced by draft tokens. A pass advances a copy. Commit keeps the copy if all of its tokens were
accepted, and otherwise replays the accepted tokens on the committed state. Any state that can be copied works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.cache.base import Layout, UnboundedCache, lay_out
from outrider.core.types import Batch, Draft, Round

State = Any  # a cache object of transformers for one sequence


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
        """`fresh()` makes a state. `advance(state, tokens [T])` advances it in place and returns logits [T, V]."""
        self.device = device
        self._fresh, self._advance = fresh, advance
        self._states: list[State | None] = [None] * slots
        self._length = [0] * slots
        self._read: dict[int, tuple[State, int]] = {}  # by slot: an advanced copy, and its number of draft tokens

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._states[slot] = self._fresh()
        self._length[slot] = 0
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        assert first < 0, "a recurrent model cannot extend a draft node by node"
        self._read.clear()
        return lay_out(batch, draft, first, self.device)

    def read(self, slot: int, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Advance a copy of a slot's state by `tokens` [T] and return logits [T, V].

        The last `width` tokens are a chain of draft tokens; -1: they are a branch of a tree.
        """
        state = copy.deepcopy(self._states[slot])
        logits = self._advance(state, tokens)
        self._read[slot] = (state, width)
        return logits

    def commit(self, round: Round) -> None:
        for b, (row, feed, path) in enumerate(zip(round.batch.seqs, round.batch.feed, round.path, strict=True)):
            state, width = self._read[row.slot]
            if width == len(path) and path == tuple(range(width)):
                self._states[row.slot] = state
            else:
                kept = round.draft.tokens[b, list(path)]
                self._advance(self._states[row.slot], torch.cat([torch.tensor(feed, device=self.device), kept]))
            self._length[row.slot] += len(feed) + len(path)
        self._read.clear()

    def release(self, slot: int) -> None:
        self._states[slot] = None
        self._length[slot] = 0

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return sum(_bytes(state) for state in self._states if state is not None)


def _bytes(state: State) -> int:
    """Bytes of all tensors in the layers of a state."""
    total, queue = 0, [vars(layer) for layer in getattr(state, "layers", [])]
    while queue:
        for value in queue.pop().values():
            if isinstance(value, torch.Tensor):
                total += value.nbytes
            elif isinstance(value, dict):
                queue.append(value)
    return total
