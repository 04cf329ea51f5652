"""Blocks of GGUF files as integers whose groups of inputs have a scale, and some a minimum besides."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

_HALF = 2  # bytes of a float16
_SUPER = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # bytes of 256 inputs
_SIMPLE = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # bytes of 32 inputs
BITS = {  # of a weight on the device, with its scales
    "Q4_0": 4.5, "Q4_1": 5.5, "Q5_0": 8.5, "Q5_1": 9.5, "Q8_0": 8.5,
    "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 7.125, "Q6_K": 6.5625,
}  # fmt: skip


def device_bytes(kind: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of a file on the device. Types that do not stay quantized expand to `dtype`."""
    return int(prod(shape) * BITS.get(kind, 8 * dtype.itemsize)) // 8


class Integers(NamedTuple):
    """A matrix [N, K]: (value - middle) * scale - minimum. The middle of 4, 6 and 8 bits is 8, 32 and 128.

    With a factor, it is (value - middle) * scale * factor, or value * scale * factor - minimum * its factor.
    """

    values: torch.Tensor  # [N, K] uint8
    bits: int  # 4, 6 or 8
    scale: torch.Tensor  # [N, groups] float16, or int8 with a factor
    minimum: torch.Tensor | None  # [N, groups] float32, or uint8 with a factor; None: 0
    factor: torch.Tensor | None = None  # [N, K / 256] float16; with a minimum [N, 2 K / 256], its factor after each


def read_integers(kind: str, rows: torch.Tensor) -> Integers:
    """Return the integers of blocks of a type of `KINDS`. `rows` are bytes [N, bytes of a row]."""
    if kind in _SUPER:
        return _read_super(kind, rows.view(len(rows), -1, _SUPER[kind]))
    blocks = rows.view(len(rows), -1, _SIMPLE[kind])
    halves = 2 if kind.endswith("_1") else 1
    numbers = _halves(blocks[..., : halves * _HALF])
    scale = numbers[..., 0]
    minimum = -numbers[..., 1].float() if halves == 2 else None  # of 0
    rest = blocks[..., halves * _HALF :]
    if kind == "Q8_0":
        return Integers((rest ^ 128).flatten(1), 8, scale, None)
    if kind.startswith("Q4"):
        # The minimum of a block is that of the value 0, and here it is that of the middle.
        lowest = None if minimum is None else minimum - 8 * scale.float()
        return Integers(_nibbles(rest).flatten(1), 4, scale, lowest)
    places = torch.arange(8, dtype=torch.uint8)
    high = (rest[..., :4, None] >> places & 1).flatten(-2)
    values = _nibbles(rest[..., 4:]) | high << 4
    return Integers((values + (112 if minimum is None else 128)).flatten(1), 8, scale, minimum)


def _read_super(kind: str, blocks: torch.Tensor) -> Integers:
    """Read blocks [N, B, bytes] of 256 inputs, whose groups have integer scales with a common factor."""
    if kind in ("Q4_K", "Q5_K"):
        return _read_eight(blocks)
    if kind == "Q6_K":
        low, high, scale, factor = blocks.split([128, 64, 16, _HALF], -1)
        values = _nibbles(low.unflatten(-1, (2, 64))).unflatten(-1, (4, 32)) | _pairs(high.unflatten(-1, (2, 32))) << 4
        return _super(values, 6, scale.view(torch.int8), factor)
    if kind == "Q3_K":
        mask, low, scale, factor = blocks.split([32, 64, 12, _HALF], -1)
        bit = (mask[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).unflatten(-2, (2, 4))
        values = _pairs(low.unflatten(-1, (2, 32))) + 4 + 4 * bit
        wide = torch.cat([scale[..., :8] & 15, scale[..., :8] >> 4], -1) | _pairs(scale[..., None, 8:]).flatten(-3) << 4
        return _super(values, 4, wide.view(torch.int8) - 32, factor)
    both, low, factors = blocks.split([16, 64, 2 * _HALF], -1)
    return _super(_pairs(low.unflatten(-1, (2, 32))), 4, both & 15, factors, both >> 4)


def _read_eight(blocks: torch.Tensor) -> Integers:
    """Read blocks of Q4_K or Q5_K: eight groups, whose scales and minimums have 6 bits."""
    low, high, both = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([low & 63, both & 15 | low >> 6 << 4], -1)
    minimum = torch.cat([high & 63, both >> 4 | high >> 6 << 4], -1)
    values = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))  # [N, B, 4, 64]
    if blocks.shape[-1] == _SUPER["Q4_K"]:
        return _super(values, 4, scale, blocks[..., :4], minimum)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    values = values.view(*blocks.shape[:2], 8, 32) | (blocks[..., None, 16:48] >> places & 1) << 4
    scale = scale.repeat_interleave(2, -1)  # six bits have groups of 16
    return _super(values, 6, scale, blocks[..., :4], minimum.repeat_interleave(2, -1))


def _super(
    values: torch.Tensor, bits: int, scale: torch.Tensor, factor: torch.Tensor, minimum: torch.Tensor | None = None
) -> Integers:
    """Return the integers of blocks [N, B, ...]."""
    lowest = None if minimum is None else minimum.flatten(1)
    return Integers(values.flatten(1), bits, scale.view(torch.int8).flatten(1), lowest, _halves(factor).flatten(1))


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of bytes [..., 2 n]."""
    return data.contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the integers [..., 2 n] of bytes [..., n]: the low halves of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _pairs(data: torch.Tensor) -> torch.Tensor:
    """Return the two-bit integers [..., 4, n] of bytes [..., n], from the lowest bits on."""
    return data[..., None, :] >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
