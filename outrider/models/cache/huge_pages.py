"""Memory in huge pages, if the system supports them."""

import mmap
from math import prod

import torch


def reserve(size: int) -> mmap.mmap:
    """Reserve `size` bytes of zeros. Pages that are not written take no memory.

    A pass reads all weights once. With small pages, address translation takes as long as the memory
    accesses, and longer on a virtual machine.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in huge pages."""
    count = prod(shape)
    memory = reserve(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.zeros(shape, dtype=dtype)
