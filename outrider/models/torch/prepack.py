"""Pack weights into the blocked layout of oneDNN's bfloat16 kernels.

The memory bandwidth for the weights limits a decode step. torch's bfloat16 linear layer reorders the weights in every
call and reaches about half of the bandwidth. If they are reordered once, oneDNN reaches almost all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outrider.models.torch.quantize import QuantizedLinear, is_linear
from outrider.models.torch.weights import check_weights, tied_weight
from outrider.runtime.ranks import local

_LAYOUT_ROWS = 8  # input rows that the layout is tuned for: one token and its draft
_MIN_ROWS = 4  # a single input row is padded to this number, because oneDNN has a slower kernel for it
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers with the same input


class _Stack:
    """Packed weights of layers with the same input, multiplied in one call.

    The first layer that is called with an input computes the outputs of all layers; the others
    return their part. A layer with another input works, too, and costs as much as all of them.
    """

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.shapes = [weight.shape for weight in weights]
        self._sizes = list(map(len, weights))
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases if bias is not None])
        self.packed = _pack(torch.cat([weight.detach() for weight in weights]))
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._pending: set[int] = set()  # layers that have not taken their outputs

    def __call__(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if len(self._sizes) == 1:
            return _linear(x, self.packed, self.bias)
        if x is not self._input:
            self._input = x
            self._parts = torch.split(_linear(x, self.packed, self.bias), self._sizes, -1)
            self._pending = set(range(len(self._sizes)))
        part = self._parts[index]
        self._pending.discard(index)
        if not self._pending:
            self._forget()
        return part

    def weight(self, index: int) -> torch.Tensor:
        return torch.split(self.packed.to_dense(), self._sizes)[index]

    def bias_of(self, index: int) -> torch.Tensor | None:
        return None if self.bias is None else torch.split(self.bias, self._sizes)[index]

    def load(self, index: int, weight: torch.Tensor) -> None:
        weights = list(torch.split(self.packed.to_dense(), self._sizes))
        weights[index] = weight.detach()
        self.packed = _pack(torch.cat(weights))
        self._forget()

    def _forget(self) -> None:
        """Drop the last input and its outputs."""
        self._input = None
        self._parts = ()


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, alone or in a stack."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._stack = _Stack([weight], [bias])
        self._index = 0

    @classmethod
    def together(cls, layers: Sequence[nn.Linear]) -> list[PackedLinear]:
        """Return packed layers that share one stack. The layers have the same input."""
        packed = [cls(layers[0].weight[:1], None) for _ in layers]
        stack = _Stack([layer.weight for layer in layers], [layer.bias for layer in layers])
        for index, layer in enumerate(packed):
            layer._stack = stack
            layer._index = index
        return packed

    @property
    def shape(self) -> torch.Size:
        return self._stack.shapes[self._index]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.shape.numel() * 2

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight [out, in] in the usual layout, for models that read it."""
        return self._stack.weight(self._index)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out]. It can be written to."""
        return self._stack.bias_of(self._index)

    def load(self, weight: torch.Tensor) -> None:
        """Replace the weight [out, in]."""
        self._stack.load(self._index, weight.to(self._stack.packed.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._stack(x, self._index)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)  # type: ignore[no-any-return]


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.numel() > x.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    padded = x.reshape(1, -1).expand(_MIN_ROWS, -1).contiguous()
    out = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")[:1]
    return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine has oneDNN kernels for weights of this dtype."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack(model: nn.Module) -> None:
    """Replace every linear layer of `model` by a packed one. The original weights are freed."""
    for module in list(model.modules()):
        unpacked = {name: child for name, child in module.named_children() if is_linear(child)}
        for names in _SHARED_INPUT:
            layers = [unpacked[name] for name in names if name in unpacked]
            compatible = len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
            if len(layers) == len(names) and compatible:
                for name, packed in zip(names, PackedLinear.together(layers), strict=True):
                    setattr(module, name, packed)
                    del unpacked[name]
        for name, child in unpacked.items():
            setattr(module, name, PackedLinear(child.weight, child.bias))


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model by name. Nothing changes if one of them does not fit. Packed layers are repacked."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    tied_names = {**{source: target for target, source in tied.items()}, **tied}
    stored = loadable(model)
    check_weights(weights, {name: value.shape for name, value in stored.items()})
    for name in weights.keys() & tied.keys():
        tied_weight(weights, name, tied[name])
    # A packed layer has its own copy of a tied weight, so tied weights are loaded under both names.
    tied_weights = {tied_names[name]: value for name, value in weights.items() if name in tied_names}
    for name, value in {**tied_weights, **weights}.items():
        old = stored[name]
        if isinstance(old, torch.Tensor):
            old.data.copy_(value)
        else:
            old.load(value)


def loadable(model: torch.nn.Module) -> dict[str, torch.Tensor | PackedLinear | QuantizedLinear]:
    """Return what `load_weights` can replace, by name: tensors, and the layers that hold packed weights."""
    layer_types = PackedLinear | QuantizedLinear
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, layer_types)}
    stored: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    stored |= {f"{name}.weight": layer for name, layer in layers.items()}
    return stored | {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}


def weight_bytes(model: nn.Module, *, excluding: nn.Module | None = None) -> int:
    """Return the bytes of all weights. Shared tensors count once. Tensors of `excluding` do not count."""
    excluded = {} if excluding is None else _sizes_by_identity(excluding)
    return sum(size for key, size in _sizes_by_identity(model).items() if key not in excluded)


def _sizes_by_identity(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each tensor and packed layer, by identity."""
    tensors = list(map(local, (*model.parameters(), *model.buffers())))
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    for module in model.modules():
        if isinstance(module, PackedLinear | QuantizedLinear):
            sizes[id(module)] = module.nbytes
    return sizes
