"""Settings of the memory allocator of glibc."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_BLOCK, _KEPT = 1 << 30, (1 << 31) - 1  # bytes
_GROWN = 1 << 31  # bytes, after which what is free is given back


class Heap:
    """Keeps memory that a training step frees for the next one.

    By default glibc maps large blocks anew each time, and clearing their pages takes a quarter of a step. It never
    returns free memory between used blocks, so the process grows.
    """

    def __init__(self) -> None:
        self._libc = _glibc()
        if self._libc:
            self._libc.mallopt(_MMAP_THRESHOLD, _BLOCK)
            self._libc.mallopt(_TRIM_THRESHOLD, _KEPT)
        self._least = _resident() if self._libc else 0

    def tidy(self, *, grown: int = _GROWN) -> None:
        """Return free memory to the system, if the process has grown by enough bytes since the last call."""
        if self._libc and _resident() >= self._least + grown:
            self._libc.malloc_trim(0)
            self._least = _resident()


def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None  # musl has neither


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
