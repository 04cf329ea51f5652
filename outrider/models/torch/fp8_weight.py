"""Matrices of FP8 with a scale for each block, as quantized checkpoints store them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider.models.torch.gguf_linear import BlockWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """A matrix of FP8: weight = value * scale, in float32."""

    values: torch.Tensor  # [outputs, inputs] float8_e4m3fn
    scale: torch.Tensor  # [outputs / rows, inputs / columns] of any float dtype; the last blocks may be smaller
    block: tuple[int, int]  # rows and columns of a block

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [outputs, inputs] in float32."""
        return self.values.float() * by_block(self.scale, self.values.shape, self.block)


class Fp8Weight(BlockWeight):
    """A matrix of FP8 in a file. It is read when it is used."""

    kind = "fp8"

    def __init__(self, read: Callable[[], Fp8], shape: torch.Size, nbytes: int) -> None:
        """Refer to a matrix of some bytes in the file."""
        self.fp8 = read
        self.shape = shape
        self._nbytes = nbytes
        self.release = lambda: None  # nothing is kept

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        return self.fp8().dequantize()[rows]


def by_block(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each weight in float32, from scales of blocks [outputs / rows, inputs / columns].

    Args:
        shape: of the matrix, whose last blocks may be smaller.
        block: rows and columns of a block.
    """
    wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]
