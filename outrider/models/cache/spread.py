"""The form in which keys are rounded to int8."""

from __future__ import annotations

import torch


def spread(keys: torch.Tensor) -> torch.Tensor:
    """Multiply each part of keys [..., dim] with a Hadamard matrix, as `spread` in models/native/csrc/pool.cpp.

    A part has as many numbers as the largest power of two that divides `dim`. Twice the function
    multiplies keys by that number.
    """
    part = part_size(keys.shape[-1])
    out = keys.unflatten(-1, (-1, part))
    half = 1
    while half < part:
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return out.flatten(-2)


def part_size(dim: int) -> int:
    """Return the largest power of two that divides `dim`."""
    return dim & -dim
