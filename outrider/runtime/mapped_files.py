"""Files of weights, mapped into memory: the system reads their pages when they are used. Nothing here needs torch."""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """A tensor in a mapped file."""

    name: str
    kind: str  # name of its type, such as BF16 or Q4_K
    shape: tuple[int, ...]  # as torch orders it: the last dimension is contiguous
    data: NDArray[np.uint8]  # [bytes] of the file
    file: mmap.mmap
    begin: int  # of the data in the file

    def release(self) -> None:
        """Give the pages of the data back to the system, which reads them again when used."""
        if hasattr(mmap, "MADV_DONTNEED") and len(self.data):
            begin = self.begin // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_DONTNEED, begin, self.begin + len(self.data) - begin)


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory. An OSError or ValueError says that it is missing or empty."""
    with path.open("rb") as content:
        # Private and writable, since torch warns of memory that is not writable. Nothing writes to it.
        return mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor from an index of files. Raises OutriderError if it cannot be read."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OutriderError(f"{index} cannot be read ({error}); copy the checkpoint again") from error
