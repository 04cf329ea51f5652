"""Losses of many places with their slopes, a few places at a time.

A law is as long as the vocabulary, and a loss goes over it a dozen times on its way there and back. Done for all places
at once, each of these goes through memory; done for a few, they stay in the processor's cache, and only the slope is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from outrider.train.loss.losses import LENGTH, LOSSES, Distributions

_AT_ONCE: Mapping[str, int] = MappingProxyType({"cpu": 1 << 18})  # logits: a second-level cache's worth of float32
_ELSEWHERE = 1 << 26


def chunked_loss(
    logits: torch.Tensor, p: torch.Tensor, losses: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is lost, and what is kept, at each of n places.

    Args:
        logits: [n, Vd] the draft's.
        p: [n, Vd] the target's probabilities.
        losses: weights by name.

    Returns:
        The weighted sum of the losses [n], those of several guesses together left out, and alpha [n], which has a slope
        if there are such losses.
    """
    return _Judged.apply(logits, p, losses)  # type: ignore[no-untyped-call, no-any-return]


class _Judged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, p: torch.Tensor, losses: Mapping[str, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        together = LENGTH in losses
        single = {name: share for name, share in losses.items() if name != LENGTH}
        lost, kept = (torch.zeros(len(logits), device=logits.device) for _ in range(2))
        wanted = [i for i, has in enumerate((single, together)) if has]
        slopes = [logits.new_empty(logits.shape) for _ in wanted]
        step = max(_AT_ONCE.get(logits.device.type, _ELSEWHERE) // logits.shape[1], 1)
        for begin in range(0, len(logits), step):
            some = slice(begin, begin + step)
            with torch.enable_grad():
                here = logits[some].detach().float().requires_grad_()
                laws = Distributions(p[some], here.log_softmax(-1))
                parts = [share * LOSSES[name](laws) for name, share in single.items()]
                found = (sum(parts, torch.zeros_like(laws.alpha)), laws.alpha)
                for slope, i in zip(slopes, wanted, strict=True):
                    (slope[some],) = torch.autograd.grad(found[i].sum(), here, retain_graph=i != wanted[-1])
            lost[some], kept[some] = (each.detach() for each in found)
        ctx.save_for_backward(*slopes)
        ctx.wanted = wanted
        if not together:
            ctx.mark_non_differentiable(kept)
        return lost, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *moved: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [moved[i][:, None] * slope for i, slope in zip(ctx.wanted, ctx.saved_tensors, strict=True)]
        return sum(parts[1:], parts[0]), None, None
