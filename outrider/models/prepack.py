"""Weights in the blocked layout of oneDNN's bfloat16 kernels.

A decode step is bound by reading the weights. torch's bfloat16 linear layer reorders them in every call and reaches
about half of the memory bandwidth. Reordered once, oneDNN reads them at close to the full bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from outrider.errors import OutriderError
from outrider.models.quantize import QuantizedLinear

_ROWS = 8  # batch size that the layout is tuned for: one token and its draft
_FEWEST = 4  # smaller batches are padded to this size, because oneDNN has slower kernels for them
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers with the same input


class _Stack:
    """Packed weights of layers with the same input, multiplied in one call.

    The first layer that is called with an input computes the outputs of all layers; the others return their part. A
    layer with another input works, too, and costs as much as all of them.
    """

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.shapes = [weight.shape for weight in weights]
        self._sizes = [len(weight) for weight in weights]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases if bias is not None])
        self.packed = _pack(torch.cat([weight.detach() for weight in weights]))
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._wanted: set[int] = set()

    def __call__(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if len(self._sizes) == 1:
            return _linear(x, self.packed, self.bias)
        if x is not self._input:
            self._input, self._parts = x, torch.split(_linear(x, self.packed, self.bias), self._sizes, -1)
            self._wanted = set(range(len(self._sizes)))
        part = self._parts[index]
        self._wanted.discard(index)
        if not self._wanted:
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
        self._input, self._parts = None, ()


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, alone or in a stack."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._stack, self._index = _Stack([weight], [bias]), 0

    @classmethod
    def together(cls, layers: Sequence[nn.Linear]) -> list[PackedLinear]:
        """Pack layers that share one stack."""
        packed = [cls(layers[0].weight[:1], None) for _ in layers]
        stack = _Stack([layer.weight for layer in layers], [layer.bias for layer in layers])
        for index, layer in enumerate(packed):
            layer._stack, layer._index = stack, index
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
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)  # type: ignore[no-any-return]


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.numel() > x.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    few = x.reshape(1, -1).expand(_FEWEST, -1).contiguous()
    out = torch.ops.mkldnn._linear_pointwise(few, packed, bias, "none", [], "")[:1]
    return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine has the kernels."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack(model: nn.Module) -> None:
    """Replace every linear layer of `model` by a packed one. The original weights are freed."""
    for module in list(model.modules()):
        plain = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        for names in _TOGETHER:
            layers = [plain[name] for name in names if name in plain]
            same = len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
            if len(layers) == len(names) and same:
                for name, packed in zip(names, PackedLinear.together(layers), strict=True):
                    setattr(module, name, packed)
                    del plain[name]
        for name, child in plain.items():
            setattr(module, name, PackedLinear(child.weight, child.bias))


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model by name. Nothing changes if one of them does not fit. Packed layers are repacked."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    twins = {**{source: target for target, source in tied.items()}, **tied}
    kinds = PackedLinear | QuantizedLinear
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    packed = {f"{name}.weight": layer for name, layer in layers.items()}
    plain = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    plain |= {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}
    for name, value in weights.items():
        if name not in packed and name not in plain:
            raise OutriderError(f"the model has no weight {name!r}; use the names of its state_dict")
        if value.shape != (shape := packed[name].shape if name in packed else plain[name].shape):
            raise OutriderError(f"{name} has shape {tuple(value.shape)}; give {tuple(shape)}")
    # A packed layer has a copy of a tied weight.
    both = {**{twins[name]: value for name, value in weights.items() if name in twins}, **weights}
    for name, value in both.items():
        if name in packed:
            packed[name].load(value)
        else:
            plain[name].data.copy_(value)


def weight_bytes(model: nn.Module, *, beside: nn.Module | None = None) -> int:
    """Bytes of all weights. Shared tensors count once, and those that `beside` has as well do not count."""
    known = {} if beside is None else _weights(beside)
    return sum(size for key, size in _weights(model).items() if key not in known)


def _weights(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each tensor and packed layer, by identity."""
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    layers = (module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear))
    return plain | {id(module): module.nbytes for module in layers}
