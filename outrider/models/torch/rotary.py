"""Rotary position embeddings (Su et al. 2021)."""

import torch


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_(i + R/2)) of the first R dimensions by their angles [*, R]."""
    size = cosine.shape[-1]
    if not size:
        return x
    first, second = x[..., :size].chunk(2, -1)
    rotated = x[..., :size] * cosine + torch.cat([-second, first], -1) * sine
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], -1)
