"""Blocks of GGUF files as integers: those whose groups of 32 inputs have a scale, and some a minimum besides."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 32  # inputs that share a scale
_HALF = 2  # bytes of a float16
_SUPER = {"Q4_K": 144, "Q5_K": 176}  # bytes of 256 inputs
_SIMPLE = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # bytes of 32 inputs
KINDS = (*_SIMPLE, *_SUPER)


class Integers(NamedTuple):
    """A matrix [N, K]: (value - middle) * scale - minimum. The middle is 8 or 128."""

    values: torch.Tensor  # [N, K] uint8
    bits: int  # 4 or 8
    scale: torch.Tensor  # [N, K / 32] float16 or float32
    minimum: torch.Tensor | None  # [N, K / 32] float32; None: 0


def read_integers(kind: str, rows: torch.Tensor) -> Integers:
    """Return the integers of blocks of a type of `KINDS`. `rows` are bytes [N, bytes of a row]."""
    if kind in _SUPER:
        return _read_super(rows.view(len(rows), -1, _SUPER[kind]))
    blocks = rows.view(len(rows), -1, _SIMPLE[kind])
    halves = 2 if kind.endswith("_1") else 1
    numbers = _halves(blocks[..., : halves * _HALF])
    scale = numbers[..., 0]
    minimum = -numbers[..., 1].float() if halves == 2 else None  # of 0
    rest = blocks[..., halves * _HALF :]
    if kind == "Q8_0":
        return Integers((rest ^ 128).flatten(1), 8, scale, None)
    if kind.startswith("Q4"):
        return _four_bits(_nibbles(rest).flatten(1), scale, minimum)
    places = torch.arange(8, dtype=torch.uint8)
    high = (rest[..., :4, None] >> places & 1).flatten(-2)
    values = _nibbles(rest[..., 4:]) | high << 4
    return Integers((values + (112 if minimum is None else 128)).flatten(1), 8, scale, minimum)


def _read_super(blocks: torch.Tensor) -> Integers:
    """Read blocks [N, B, bytes] of eight groups, whose scales and minimums have 6 bits and a common factor."""
    factors = _halves(blocks[..., : 2 * _HALF]).float()
    low, high, both = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([low & 63, both & 15 | low >> 6 << 4], -1)
    minimum = torch.cat([high & 63, both >> 4 | high >> 6 << 4], -1)
    wide_scale = (factors[..., :1] * scale).flatten(1)
    wide_minimum = (factors[..., 1:] * minimum).flatten(1)
    values = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))  # [N, B, 4, 64]
    if blocks.shape[-1] == _SUPER["Q4_K"]:
        return _four_bits(values.flatten(1), wide_scale, wide_minimum)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    values = values.view(*blocks.shape[:2], 8, 32) | (blocks[..., None, 16:48] >> places & 1) << 4
    return Integers((values + 128).flatten(1), 8, wide_scale, wide_minimum)


def _four_bits(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None) -> Integers:
    """Return integers of 4 bits, given the minimum of the value 0; None: that of the middle is 0."""
    return Integers(values, 4, scale, None if minimum is None else minimum - 8 * scale.float())


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of bytes [..., 2 n]."""
    return data.contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the integers [..., 2 n] of bytes [..., n]: the low halves of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], -1)
