"""Memory in huge pages where the system has them."""

from __future__ import annotations

import mmap
from math import prod

import torch


def reserve(size: int) -> mmap.mmap:
    """So many bytes, zero; what is not written to takes no memory.

    A pass reads weights and cached text once, and looking up the addresses of small pages then costs as much as the
    reading itself; on a virtual machine more.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in such memory."""
    count = prod(shape)
    memory = reserve(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.zeros(shape, dtype=dtype)
