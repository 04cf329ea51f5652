"""A tensor in a file that is mapped into memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """A tensor in a mapped file. The system reads its pages when they are used."""

    name: str
    kind: str  # name of its type, such as BF16 or Q4_K
    shape: tuple[int, ...]  # as torch orders it: the last dimension is contiguous
    data: NDArray[np.uint8]  # [bytes] of the file
    file: mmap.mmap
    begin: int  # of the data in the file

    def release(self) -> None:
        """Give the pages of the data back to the system, which reads them again when they are used."""
        if hasattr(mmap, "MADV_DONTNEED") and len(self.data):
            begin = self.begin // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_DONTNEED, begin, self.begin + len(self.data) - begin)
