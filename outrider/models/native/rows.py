"""Pack dense matrices for the kernels row by row, from memory or a mapped file."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from outrider.models.native.arena import Arena, Refill
from outrider.models.native.library import load_library
from outrider.models.native.pack import FLOAT_DTYPES, GROUP, PANEL, PackedWeight
from outrider.models.native.structures import CBlockMatrix

_BYTES = 8  # bits of what the kernels copy


def can_pack_rows(parts: Sequence[torch.Tensor], bits: int) -> bool:
    """Return whether `pack_rows` takes these matrices."""
    dtype = FLOAT_DTYPES.get(bits)
    return all(
        part.dtype == dtype and part.dim() == 2 and part.stride(1) == 1 and part.shape[1] % GROUP == 0 for part in parts
    )


def pack_rows(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    bits: int,
    order: torch.Tensor | None = None,
    arena: Arena | Refill,
) -> PackedWeight:
    """Pack matrices, one above the other, as `pack` does. They are read once, by all threads.

    Args:
        parts: the matrices [outputs, inputs], which `can_pack_rows` accepts.
        bias: [outputs] of all of them, or None.
        bits: 32 (float32) or 16 (bfloat16), the type of the matrices.
        order: [outputs] the row of each output, if they are in another order.
        arena: the memory of the result.
    """
    size = FLOAT_DTYPES[bits].itemsize
    addresses = np.concatenate(
        [part.data_ptr() + np.arange(len(part), dtype=np.uint64) * np.uint64(part.stride(0) * size) for part in parts]
    )
    if order is not None:
        addresses = np.ascontiguousarray(addresses[order.numpy()])
    outputs, inputs = len(addresses), parts[0].shape[1]
    words = arena.zeros((-(-outputs // PANEL), inputs * bits // 32, PANEL), torch.int32)
    matrix = CBlockMatrix(
        row=addresses.ctypes.data, words=words.data_ptr(), inputs=inputs * bits // _BYTES, outputs=outputs
    )
    load_library().code.outrider_pack_integers(ctypes.byref(matrix), _BYTES)
    return PackedWeight(
        words=words,
        scale=None,
        minimum=None,
        bias=None if bias is None else bias.float().contiguous(),
        shape=(outputs, inputs),
        bits=bits,
    )
