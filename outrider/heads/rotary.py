"""How fast positions turn the pairs of a head's numbers (Su et al. 2021), slowed down for longer texts or not."""

from __future__ import annotations

import math

import torch

from outrider.heads.description import Body, Rope, Scaling


def frequencies(body: Body, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
    """Radians a position [dim * rotary / 2] or all [dim / 2], float32, and what cosines and sines are multiplied by."""
    rope, turned = body.rope, int(body.dim * body.rotary)
    size = body.dim if rope and rope.scaling is Scaling.PROPORTIONAL else turned
    plain = body.theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if rope is None:
        return plain, 1.0
    if rope.scaling is Scaling.PROPORTIONAL:
        still = torch.arange(size // 2, device=device) >= turned // 2
        return (plain / rope.factor).masked_fill(still, 0.0), rope.amplitude
    if rope.scaling is Scaling.LINEAR:
        return plain / rope.factor, rope.amplitude
    kept = _by_turns(plain, rope) if rope.scaling is Scaling.LLAMA3 else _by_pairs(plain, rope, body.theta)
    return plain * kept + plain / rope.factor * (1 - kept), rope.amplitude


def _by_turns(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The share of each frequency that is kept: by how often it turns in the original context (Llama 3.1)."""
    turns = rope.original * plain / (2 * math.pi)
    return ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)


def _by_pairs(plain: torch.Tensor, rope: Rope, theta: float) -> torch.Tensor:
    """The same by where in the head a pair stands (YaRN, Peng et al. 2023, 3.2)."""
    count = len(plain)

    def place(turns: float) -> float:
        """The pair, counted with fractions, that turns so often in the original context."""
        return count * math.log(rope.original / (turns * 2 * math.pi)) / math.log(theta)

    begin, end = place(rope.high), place(rope.low)
    if rope.rounded:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * count - 1)
    end += 1e-3 if begin == end else 0
    return 1 - ((torch.arange(count, device=plain.device) - begin) / (end - begin)).clamp(0, 1)
