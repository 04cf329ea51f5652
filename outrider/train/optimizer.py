"""The optimiser: Muon for matrices between layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_DECAY = 0.01  # of matrices; vectors keep their size


class Optimizer:
    """Two optimisers with one learning rate.

    Muon (Jordan et al. 2024) moves a matrix by its slope made orthogonal, here with steps of AdamW's size (Liu et al.
    2025, 2502.16982), and gets as far in half the steps. Tables, whose rows are tokens, and vectors take AdamW's.
    """

    def __init__(self, module: nn.Module, *, lr: float, vocab: int) -> None:
        """`vocab` tells tables from matrices: an output layer has that many rows."""
        inner = {id(matrix) for matrix in _matrices(module, vocab)}
        weights = list(module.parameters())
        others = [weight for weight in weights if id(weight) not in inner]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {"params": [weight for weight in others if weight.dim() > 1], "weight_decay": _DECAY},
                    {"params": [weight for weight in others if weight.dim() < 2], "weight_decay": 0.0},
                ],
                lr=lr,
                betas=(0.9, 0.95),
            )
        ]
        if inner:
            matrices = [weight for weight in weights if id(weight) in inner]
            self._parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"))

    def step(self, lr: float) -> None:
        """Move all weights that have a slope."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def forget(self) -> None:
        """Drop all slopes."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def _matrices(module: nn.Module, vocab: int) -> Iterator[nn.Parameter]:
    whole = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    tables = [each.get_output_embeddings() for each in whole]  # which may hold more tokens than are guessed
    for each in module.modules():
        if not isinstance(each, nn.Linear) or each in tables:
            continue
        if each.weight.shape[0] != vocab and min(each.weight.shape) > 1:
            yield each.weight  # type: ignore[misc]
