"""The paged KV cache on a GPU: entries in the order of their positions, read through block tables."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from outrider.models.cache.paged import PagedCache
from outrider.models.cache.prefix_tree import BLOCK

_FIRST_BYTES = 1 << 28  # of the blocks until `resize`, which the check after loading needs


class DevicePagedCache(PagedCache):
    """Keys and values [blocks, layers, heads, 2, BLOCK, dim] on one device.

    All of the memory is allocated when `resize` is called. Until then there are blocks for one
    sequence of a full context, or fewer.
    """

    def __init__(
        self,
        *,
        slots: int,
        capacity: int,
        layers: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate some blocks. The arguments are those of `PagedCache`."""
        self.device = device
        self.allocations = 0  # how often the memory was replaced
        block_bytes = layers * heads * 2 * BLOCK * dim * dtype.itemsize
        self._first_blocks = max(_FIRST_BYTES // block_bytes, 2)
        super().__init__(slots=slots, capacity=capacity, layers=layers, heads=heads, dim=dim, dtype=dtype)

    @property
    def reach(self) -> int:
        """Blocks of a full context, which is the length of a row of `rows`."""
        return self._reach

    @property
    def pages(self) -> torch.Tensor:
        """The memory [blocks, layers, heads, 2, BLOCK, dim]. `resize` replaces it."""
        return self._entries

    def rows(self, slots: Sequence[int]) -> array[int]:
        """Return the block tables of slots, one after the other, of `reach` blocks each."""
        table = array("i")
        for slot in slots:
            table += self._table[slot * self._reach : (slot + 1) * self._reach]
        return table

    def _allocate(self, blocks: int) -> torch.Tensor:
        if not self.allocations:  # before the memory is divided among the models
            blocks = min(blocks, self._first_blocks)
        self.allocations += 1
        self._entries = torch.empty(0)  # frees the older memory first
        return torch.zeros(blocks, *self._shape, dtype=self._dtype, device=self.device)

    def _views(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = entries.unbind(-3)
        return keys, values

    def _by_position(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._views(entries)  # [slots, blocks, heads, BLOCK, dim]
        return keys.transpose(1, 2).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)

    def _compact(self, slot: int, base: int, path: Sequence[int]) -> None:
        block, at = self._locate(slot, [base + node for node in path])
        to_block, to = self._locate(slot, range(base, base + len(path)))
        self._entries[to_block, :, :, :, to] = self._entries[block, :, :, :, at]
