"""Rotary frequencies (Su et al. 2021), optionally scaled for longer contexts."""

from functools import lru_cache

import torch

from outrider.models.heads.description import Body, Scaling
from outrider.models.native.rotary import llama3, yarn_share


@lru_cache(32)  # some are computed on the host, and a recorded pass must not wait for them
@torch.inference_mode(False)  # training uses the cached tensors as well
def frequencies(body: Body, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
    """Return the rotary frequencies, and the multiplier of cosines and sines.

    The frequencies are radians per position, float32: [dim * rotary / 2], or [dim / 2] with proportional scaling.
    """
    rope = body.rope
    rotated = int(body.dim * body.rotary)
    size = body.dim if rope and rope.scaling is Scaling.PROPORTIONAL else rotated
    original = body.theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if rope is None:
        return original, 1.0
    if rope.scaling is Scaling.PROPORTIONAL:
        not_rotated = torch.arange(size // 2, device=device) >= rotated // 2
        return (original / rope.factor).masked_fill(not_rotated, 0.0), rope.amplitude
    if rope.scaling is Scaling.LINEAR:
        return original / rope.factor, rope.amplitude
    if rope.scaling is Scaling.LLAMA3:
        return llama3(original, rope.original, factor=rope.factor, low=rope.low, high=rope.high), rope.amplitude
    share = yarn_share(
        len(original), body.theta, rope.original, fast=rope.high, slow=rope.low, rounded=rope.rounded
    ).to(original.device)
    return original * share + original / rope.factor * (1 - share), rope.amplitude
