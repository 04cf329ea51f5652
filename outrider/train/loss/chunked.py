"""Computes losses and their gradients for a few positions at a time.

A distribution has as many entries as the vocabulary, and the forward and backward pass of a loss go over it about a
dozen times. For all positions at once, each of these passes would go through main memory. For a few positions, the
intermediate results stay in the processor's cache, and only the gradient is stored.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from outrider.train.loss.losses import LENGTH, LOSSES, Distributions

# Logits per chunk by device type. On a CPU a chunk of float32 fits into the second-level cache.
CHUNK_LOGITS: Mapping[str, int] = MappingProxyType({"cpu": 1 << 18})
_DEFAULT_CHUNK_LOGITS = 1 << 26


def chunked_loss(
    logits: torch.Tensor, p: torch.Tensor, losses: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and alpha at each of n positions.

    Args:
        logits: [n, Vd] of the draft.
        p: [n, Vd] the target's probabilities.
        losses: weights by name.

    Returns:
        The weighted sum of the losses [n] without the length loss, and alpha [n]. Alpha has a
        gradient only if the length loss is among the losses, because that loss is computed from it.
    """
    return _ChunkedLoss.apply(logits, p, losses)  # type: ignore[no-untyped-call, no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """The forward pass computes the gradients, too. The backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, p: torch.Tensor, losses: Mapping[str, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_alpha_grad = LENGTH in losses
        position_losses = {name: weight for name, weight in losses.items() if name != LENGTH}
        loss = torch.zeros(len(logits), device=logits.device)
        alpha = torch.zeros(len(logits), device=logits.device)
        # Which of the two outputs, loss and alpha, need a gradient.
        grad_outputs = [i for i, needed in enumerate((position_losses, needs_alpha_grad)) if needed]
        grads = [logits.new_empty(logits.shape) for _ in grad_outputs]
        chunk_size = max(CHUNK_LOGITS.get(logits.device.type, _DEFAULT_CHUNK_LOGITS) // logits.shape[1], 1)
        for begin in range(0, len(logits), chunk_size):
            chunk = slice(begin, begin + chunk_size)
            with torch.enable_grad():
                chunk_logits = logits[chunk].detach().float().requires_grad_()
                dist = Distributions(p[chunk], chunk_logits.log_softmax(-1))
                terms = [weight * LOSSES[name](dist) for name, weight in position_losses.items()]
                outputs = (sum(terms, torch.zeros_like(dist.alpha)), dist.alpha)
                for grad, i in zip(grads, grad_outputs, strict=True):
                    retain = i != grad_outputs[-1]
                    (grad[chunk],) = torch.autograd.grad(outputs[i].sum(), chunk_logits, retain_graph=retain)
            loss[chunk] = outputs[0].detach()
            alpha[chunk] = outputs[1].detach()
        ctx.save_for_backward(*grads)
        ctx.grad_outputs = grad_outputs
        if not needs_alpha_grad:
            ctx.mark_non_differentiable(alpha)
        return loss, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        pairs = zip(ctx.grad_outputs, ctx.saved_tensors, strict=True)
        scaled = [output_grads[i][:, None] * grad for i, grad in pairs]
        return sum(scaled[1:], scaled[0]), None, None
