"""How a mixture of experts uses its experts, and the loss that keeps all of them in use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from outrider.scale.estimate.equations import loaded_experts

_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)  # adjacent tokens whose distinct experts are counted


@contextmanager
def router_logits(moe: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the router logits [N, experts] of each layer, in the order in which the layers run."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, outputs: seen.append(outputs[0].float()))
        for layer in moe.model.layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(logits: Sequence[torch.Tensor], top: int) -> torch.Tensor:
    """Return the mean over layers of E * sum_e f_e P_e / top, 1 if all experts are used alike (Fedus et al. 2022).

    Args:
        logits: router logits [N, E] of each layer.
        top: experts of a token.
    """
    losses = []
    for layer in logits:
        chosen = functional.one_hot(layer.topk(top).indices, layer.shape[-1]).sum(1).float().mean(0)
        losses.append(layer.shape[-1] / top * (chosen * layer.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def usage(moe: Any, rows: torch.Tensor) -> dict[str, Any]:
    """Return how the experts are used by texts [B, S], as JSON values.

    Returns:
        `largest` and `smallest`: the largest and the smallest share of an expert in the assignments of a layer, by
        layer. `distinct`: the mean number of distinct experts of a layer that so many adjacent tokens use, and the same
        number if each token chose uniformly at random.
    """
    config = moe.config
    count, top = config.num_local_experts, config.num_experts_per_tok
    with router_logits(moe) as seen:
        moe.model(rows, use_cache=False)
    chosen = [functional.one_hot(layer.topk(top).indices, count).sum(1).view(*rows.shape, count) for layer in seen]
    shares = [layer.sum((0, 1)) / layer.sum() for layer in chosen]
    distinct = {}
    for width in _WINDOWS:
        windows = [layer.unfold(1, width, 1).sum(-1) for layer in chosen]  # [B, windows, experts]
        measured = [float((each > 0).sum(-1).float().mean()) for each in windows]
        distinct[str(width)] = {
            "measured": round(sum(measured) / len(measured), 3),
            "layers": [round(each, 2) for each in measured],
            "uniform": round(loaded_experts(count, top, width), 3),
        }
    return {
        "largest": [round(float(share.max()), 3) for share in shares],
        "smallest": [round(float(share.min()), 3) for share in shares],
        "distinct": distinct,
    }
