"""The optimizer: Muon for the weight matrices of layers, AdamW for all other parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.runtime.grouping import instances

_WEIGHT_DECAY = 0.01  # of matrices; vectors have none


class Optimizer:
    """Muon and AdamW with one learning rate.

    Muon (Jordan et al. 2024) orthogonalizes the gradient of a matrix. Its updates are scaled to the size of AdamW's
    (Liu et al. 2025, 2502.16982). It needs half as many steps as AdamW. Vectors, embeddings and LM heads use AdamW.
    """

    def __init__(self, module: nn.Module, *, lr: float, vocab: int) -> None:
        """Create the optimizers for all parameters of `module`.

        Args:
            module: the module to train.
            lr: learning rate of the first step.
            vocab: rows of the draft's LM head. A linear layer with as many rows is an LM head, which uses AdamW.
        """
        muon_ids = set(map(id, _layer_matrices(module, vocab)))
        parameters = list(module.parameters())
        adamw_parameters = [parameter for parameter in parameters if id(parameter) not in muon_ids]
        tables = [parameter for parameter in adamw_parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in adamw_parameters if parameter.dim() < 2]
        groups = [{"params": tables, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]
        if muon_ids:
            matrices = [parameter for parameter in parameters if id(parameter) in muon_ids]
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append(muon)

    def step(self, lr: float) -> None:
        """Update all parameters that have a gradient."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _layer_matrices(module: nn.Module, vocab: int) -> Iterator[nn.Parameter]:
    """Yield the weights of all linear layers except LM heads."""
    # The LM head of a whole model may have more rows than the draft vocabulary has tokens.
    models = instances(module.modules(), PreTrainedModel)
    lm_heads = [model.get_output_embeddings() for model in models]
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer in lm_heads:
            continue
        if layer.weight.shape[0] != vocab and min(layer.weight.shape) > 1:
            yield layer.weight  # type: ignore[misc]
