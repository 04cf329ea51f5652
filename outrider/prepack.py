"""Weights in the layout that the CPU's bfloat16 kernels read fastest.

A decode step is bound by reading the weights once. torch's plain bfloat16 linear reorders them at every call and
reaches about half of the memory's bandwidth; reordered once, oneDNN reads them at close to all of it.
"""

from __future__ import annotations

import torch
from torch import nn

_ROWS = 8  # the batch that the layout is tuned for: one token and its guesses


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout."""

    packed: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.shape = weight.shape
        self.bias = bias
        self.load(weight)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in] as it was; a copy, for models that look at it themselves."""
        return self.packed.to_dense()

    def load(self, weight: torch.Tensor) -> None:
        """Replace the weight [out, in]."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has the kernels."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack(model: nn.Module) -> None:
    """Replace every plain linear layer of `model` by a packed one; each layer's own weight is let go."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights; a tensor that two layers share counts once."""
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    packed = [module.shape.numel() * 2 for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(plain.values()) + sum(packed)
