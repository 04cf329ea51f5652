"""What the C library does with freed memory, where it is glibc."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_BLOCK, _KEPT = 1 << 30, (1 << 31) - 1  # bytes


def hold_freed() -> None:
    """Keep what is freed for whoever asks next.

    A step takes and frees gigabytes. By itself glibc maps large blocks anew each time, and a quarter of a step is
    the clearing of their pages.
    """
    if libc := _glibc():
        libc.mallopt(_MMAP_THRESHOLD, _BLOCK)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)


def return_freed() -> None:
    """Give back what is free between what is not: otherwise the heap grows from wave to wave."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None  # musl has neither
