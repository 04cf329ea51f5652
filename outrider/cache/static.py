"""One stripe of keys and values per slot, allocated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.cache.base import CacheUsage, Layout, lay_out
from outrider.cache.prefix_tree import shared
from outrider.core import tree
from outrider.core.types import Batch, Draft, Round, SequenceState


class StaticCache:
    """Keys and values [slots, heads, capacity, dim] per layer.

    Guesses are written behind the committed text, each at its node's index. Commit closes the gaps that rejected
    branches leave; after a chain there are none to close. Memory is taken layer by layer at the first write, in the
    shape that the layer itself shows.

    A stripe keeps its text when its row ends, until another row gets the slot. Whoever begins like the text in any
    stripe, that of a running row included, takes a copy of what they share.
    """

    def __init__(self, *, slots: int, capacity: int, device: torch.device) -> None:
        self.device = device
        self._slots = slots
        self._capacity = capacity
        self._length = [0] * slots
        self._written = [0] * slots  # the end of what may not be zero
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._shares = False
        self._asked = self._spared = 0
        self.forget()

    def forget(self) -> None:
        """What has been read belongs to other weights: no later text may begin with it."""
        self._scopes: list[str | None] = [None] * self._slots
        self._texts: list[list[int]] = [[] for _ in range(self._slots)]  # as far as no row says it
        self._rows: list[SequenceState | None] = [None] * self._slots  # whose texts the stripes hold

    def set_prefix_caching(self, on: bool) -> None:
        self._shares = on

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.release(slot)
        most, wanted = 0, list(tokens[:-1])
        if scope is not None and self._shares:
            # Its own first: of equals `max` takes the first, and that one need not be copied.
            akin = [other for other in (slot, *range(self._slots)) if self._scopes[other] == scope]
            alike = {other: shared(self._said(other), wanted) for other in akin}
            source = max(alike, key=lambda other: alike[other], default=slot)
            most = alike.get(source, 0)
            if most and source != slot:
                for stripes in (*self._keys.values(), *self._values.values()):
                    stripes[slot, :, :most] = stripes[source, :, :most]
                self._written[slot] = max(self._written[slot], most)
            self._asked, self._spared = self._asked + len(tokens), self._spared + most
        self._scopes[slot], self._texts[slot], self._length[slot] = scope, wanted[:most], most
        return most

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        layout = lay_out(batch, draft, first, self.device)
        self._read(batch)
        for span in layout.spans:
            stop = span.start + span.end - span.begin
            if span.end > span.begin:
                assert stop <= self._capacity, "slot overflow"
                self._clear(span.slot, stop)
        return layout

    def commit(self, round: Round) -> None:
        batch = round.batch
        for row, start, feed, path in zip(batch.seqs, batch.start, batch.feed, round.path, strict=True):
            base = start + len(feed)
            self._length[row.slot] = base + len(path)
            if path != tuple(range(len(path))):
                self._compact(row.slot, base, path)

    def release(self, slot: int) -> None:
        self._texts[slot], self._rows[slot] = self._said(slot), None
        self._length[slot] = 0

    def fits(self, ends: Mapping[int, int]) -> bool:
        return True

    def resize(self, blocks: int) -> None:
        raise NotImplementedError("a stripe holds a whole context")

    def usage(self) -> CacheUsage:
        return CacheUsage(
            token_bytes=self.bytes() // self._slots // self._capacity, query_tokens=self._asked, hit_tokens=self._spared
        )

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        tensors = [*self._keys.values(), *self._values.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def entries(
        self, layer: int, slots: Sequence[int], begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A layer's keys and values [rows, heads, end - begin, dim] of some slots; None until it has been written.

        Behind what a slot holds stands anything that is a number.
        """
        if layer not in self._keys:
            return None
        where: slice | torch.Tensor = slice(slots[0], slots[0] + len(slots))
        if list(slots) != list(range(slots[0], slots[0] + len(slots))):
            where = tree.upload(slots, self.device)
        return self._keys[layer][where, :, begin:end], self._values[layer][where, :, begin:end]

    def write(
        self, layer: int, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the pass's keys and values [heads, T, dim]; return the layer's whole stripes."""
        if layer not in self._keys:
            self._keys[layer] = self._stripes(keys)
            self._values[layer] = self._stripes(values)
        all_keys, all_values = self._keys[layer], self._values[layer]
        for span in layout.spans:
            at = slice(span.start, span.start + span.end - span.begin)
            all_keys[span.slot, :, at] = keys[:, span.begin : span.end]
            all_values[span.slot, :, at] = values[:, span.begin : span.end]
        return all_keys, all_values

    def _read(self, batch: Batch) -> None:
        """From now on the rows say what their stripes hold."""
        for row in batch.seqs:
            self._rows[row.slot] = row

    def _said(self, slot: int) -> list[int]:
        """The text that a stripe holds."""
        row = self._rows[slot]
        return self._texts[slot] if row is None else row.token_ids[: self._length[slot]]

    def _clear(self, slot: int, stop: int) -> None:
        """Leave nothing behind `stop`, where this pass ends and another row of it may read on under its mask."""
        # What is masked must still be a number: a masked key has weight 0, and 0 times a stray NaN would be NaN.
        if stop < self._written[slot]:
            for stripes in (*self._keys.values(), *self._values.values()):
                stripes[slot, :, stop : self._written[slot]] = 0
        self._written[slot] = stop

    def _stripes(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty, for the reason given at `_clear`.
        heads, _, dim = like.shape
        return torch.zeros(self._slots, heads, self._capacity, dim, dtype=like.dtype, device=like.device)

    def _compact(self, slot: int, base: int, path: tuple[int, ...]) -> None:
        kept = tree.upload(path, self.device) + base
        for stripes in (*self._keys.values(), *self._values.values()):
            stripes[slot, :, base : base + len(path)] = stripes[slot, :, kept]
