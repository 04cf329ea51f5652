"""Rotary embedding of queries and keys."""

from __future__ import annotations

import torch


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the queries or keys [1, T, H, D] by the cosines and sines [1, T, D] of their positions."""
    first, second = states.chunk(2, -1)
    return states * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
