"""The memory of packed weights: huge pages, or the memory of an older value."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from outrider.models.cache.huge_pages import reserve

if TYPE_CHECKING:
    from outrider.models.native.pack import PackedWeight

_HUGE_PAGE = 1 << 21  # bytes
_CACHE_LINE = 64  # bytes
_CHUNK = 1 << 28  # bytes that are reserved at once


class Arena:
    """An allocator of tensors in huge pages. Only `discard` frees memory while it exists."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0
        self._full: list[mmap.mmap] = []  # memory without room for more tensors

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor in this memory."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in this memory."""
        size = prod(shape) * dtype.itemsize
        if self._memory is None or self._used + size > len(self._memory):
            # Pages that are never written take no physical memory, so a large chunk costs nothing.
            if self._memory is not None:
                self._full.append(self._memory)
            self._memory = reserve(max(_CHUNK, _round_up(size, _HUGE_PAGE)))
            self._used = 0
        out = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._used)
        self._used += _round_up(size, _CACHE_LINE)
        return out.view(shape)

    def discard(self) -> None:
        """Give the physical memory back to the system. All tensors are zero from now on, at their old addresses."""
        for memory in (*self._full, self._memory):
            if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED)


class Refill:
    """Replaces an `Arena` in a weight update: it returns the memory of the old value of the same weight.

    So the update needs no new memory, and the addresses that the kernels hold stay valid.
    """

    def __init__(self, old: PackedWeight) -> None:
        tensors = (old.words, old.scale, old.minimum)
        self._memory = [tensor for tensor in tensors if tensor is not None]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor of the old value, which has this shape. Its other elements are zero already."""
        return self._memory.pop(0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
