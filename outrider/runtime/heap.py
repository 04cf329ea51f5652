"""Settings of the memory allocator of glibc."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_MIN_MMAP_BYTES = 1 << 30  # smaller blocks come from the heap
_MAX_FREE_BYTES = (1 << 31) - 1  # free memory at the end of the heap that is not returned
_GROWTH_BYTES = 1 << 31  # growth of the process after which `tidy` returns free memory


class Heap:
    """Keeps memory that a training step frees for the next one.

    By default, glibc maps large blocks again for each step, and clearing their pages takes a
    quarter of the step. It never returns free memory between used blocks, so the process grows.
    """

    def __init__(self) -> None:
        self._libc = glibc()
        if self._libc:
            self._libc.mallopt(_MMAP_THRESHOLD, _MIN_MMAP_BYTES)
            self._libc.mallopt(_TRIM_THRESHOLD, _MAX_FREE_BYTES)
        self._base_bytes = resident_bytes() if self._libc else 0

    def tidy(self, *, grown: int = _GROWTH_BYTES) -> None:
        """Return free memory to the system if the process has grown by `grown` bytes since the last call that did."""
        if self._libc and resident_bytes() >= self._base_bytes + grown:
            self._libc.malloc_trim(0)
            self._base_bytes = resident_bytes()


def glibc() -> Any:
    """Return glibc, or None on other systems."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None  # musl has neither


def resident_bytes() -> int:
    """Return the memory of the process that is in RAM, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
