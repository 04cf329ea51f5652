"""The target's states on their way to a trained draft, and a cache of what was made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from outrider.cache.base import Cache, CacheUse, Layout
from outrider.heads.description import Description
from outrider.types import Batch, Draft, Round, Tables


class Taps:
    """What was tapped of the target's pass, by slot and place in the text, until it is read."""

    def __init__(self, description: Description, tables: Tables) -> None:
        self._description, self._tables = description, tables
        self._first: dict[int, int] = {}  # by slot, the place of the first state kept
        self._kept: dict[int, list[torch.Tensor]] = {}  # [n, taps, H] each, one behind another

    def admit(self, slot: int) -> None:
        self._first[slot], self._kept[slot] = 0, []

    def note(self, round: Round) -> None:
        """Keep the states at each row's feed and accepted path."""
        scores, taps = round.scores, self._description.taps
        for b, (row, path) in enumerate(zip(round.batch.rows, round.path, strict=True)):
            nodes = [node + 1 for node in path]
            found = [torch.cat([scores.fed[at][b], scores.features[at][b, nodes]]) for at in taps.layers]
            if taps.final:
                found[-1] = normed(found[-1], self._tables)
            self._kept[row.slot].append(torch.stack(found, 1))

    def pretend(self, slot: int, start: int, count: int) -> None:
        """Zeros in place of states."""
        it, table = self._description, self._tables.embedding
        zeros = torch.zeros(count, len(it.taps.layers), it.target_hidden, device=table.device)
        self._first[slot], self._kept[slot] = start, [zeros]

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """States [end - begin, taps, H] of these places, none of which was forgotten."""
        first, kept = self._first[slot], self._kept[slot]
        if len(kept) > 1:
            kept[:] = [torch.cat(kept)]
        return kept[0][begin - first : end - first]

    def forget(self, slot: int, before: int) -> None:
        """States before this place will not be asked for any more."""
        if self._kept[slot] and before > self._first[slot]:
            rest = torch.cat(self._kept[slot])[before - self._first[slot] :]
            self._first[slot], self._kept[slot] = before, [rest.clone()]

    def bytes(self) -> int:
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)


class StateCache:
    """Entries that were made with the target's own states, and these states until they are read."""

    def __init__(self, inner: Cache, taps: Taps, *, read: Callable[[Batch], Batch], before: int = 0) -> None:
        """Keep entries in `inner` of what `read` leaves of a batch; `before` tokens of a text have none."""
        self._inner, self._taps, self._read, self._before = inner, taps, read, before

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._taps.admit(slot)  # nothing is shared: the states of what is cached elsewhere are not known
        return self._inner.admit(slot, tokens)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self._read(batch), draft, first)

    def commit(self, round: Round) -> None:
        nothing = ((),) * len(round.batch.rows)  # a guess has no state until the target has read it
        self._inner.commit(replace(round, batch=self._read(round.batch), path=nothing))
        for row in round.batch.rows:
            self._taps.forget(row.slot, self._inner.length(row.slot))

    def release(self, slot: int) -> None:
        self._inner.release(slot)
        self._taps.admit(slot)

    def length(self, slot: int) -> int:
        held = self._inner.length(slot)
        return held + self._before if held else 0

    def share(self, on: bool) -> None:
        pass

    def allot(self, blocks: int) -> None:
        self._inner.allot(blocks)

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._inner.fits(ends)

    def use(self) -> CacheUse:
        return self._inner.use()

    def bytes(self) -> int:
        return self._inner.bytes() + self._taps.bytes()


def normed(states: torch.Tensor, tables: Tables) -> torch.Tensor:
    """The target's final norm."""
    wide = states.float()
    scale = (wide.square().mean(-1, keepdim=True) + tables.epsilon).rsqrt()
    return wide * scale * tables.norm.float()
