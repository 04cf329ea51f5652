"""8-bit and 4-bit weights on torch, for models that the native kernels do not support.

They save memory, and time in passes over few tokens. Compared with packed bfloat16 (`prepack`), a
pass over 1 token takes 0.6 times as long with 4 bits and 1.0 times with 8 bits. A pass over 5
tokens takes 1.2 and 1.6 times as long, and a prefill 2.0 and 1.1 times.
"""

import logging
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from outrider.errors import UnsupportedModel

OPERATORS = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
_MAX_INT8_ROWS = 8  # for more tokens, 8-bit weights are converted before the multiplication
_ALIGNMENT = 64  # bytes; the operators crash if an input has another alignment
_log = logging.getLogger("outrider")


def group_size(inputs: int, bits: int) -> int:
    """Return how many inputs share a scale."""
    if bits == 8:
        return inputs
    return 32 if inputs % 64 else 64


def to_integers(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return symmetric integers [out, in] int8 of a weight, and the scale [out, in / group, 1] of each group."""
    max_value = (1 << (bits - 1)) - 1
    groups = weight.detach().bfloat16().float().view(len(weight), -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / max_value).bfloat16().float()
    if bits == 4:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp((mantissa * 32).round() / 32, exponent)
    quotients = groups / scale.clamp(min=torch.finfo(torch.float32).tiny)
    values = quotients.round().clamp(-max_value, max_value).flatten(1).to(torch.int8)
    return values, scale


class QuantizedLinear(nn.Module):
    """A linear layer with symmetric integer weights times scales.

    8 bits: one scale per output. 4 bits: one scale per output and 64 inputs (32 if 64 does not divide them), with 5
    bits of precision, so that bfloat16 represents the weights exactly.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, bits: int) -> None:
        super().__init__()
        self.shape = weight.shape
        self.bias = bias
        self.bits = bits
        self._group = group_size(weight.shape[1], bits)
        self.load(weight)

    @staticmethod
    def takes(weight: torch.Tensor, bits: int) -> bool:
        """Return whether the operators support a weight [out, in] of this shape and dtype."""
        outputs, inputs = weight.shape
        fits = inputs % 16 == 0 if bits == 8 else inputs % 32 == 0 and outputs % 16 == 0
        return fits and weight.dtype == torch.bfloat16

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the quantized weight [out, in] in bfloat16, for models that read it."""
        return self.values().bfloat16()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return self._packed.nbytes + self._scale.nbytes

    def values(self) -> torch.Tensor:
        """Return the quantized weight [out, in] in float32, exactly."""
        if self.bits == 8:
            return self._packed.float() * self._scale.float()[:, None]
        # The packed layout is private to the operator. Multiplying by the identity unpacks it.
        return self._multiply(torch.eye(self.shape[1], dtype=torch.bfloat16)).T.float().contiguous()

    def load(self, weight: torch.Tensor) -> None:
        """Quantize a weight [out, in] and replace the current one."""
        values, scale = to_integers(weight, self.bits, self._group)
        if self.bits == 8:
            self._packed = values
            self._scale = scale.flatten().bfloat16()
            return
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((values + 8).int(), 2)
        # The operator expects a scale and an offset. The offset is 0.
        self._scale = functional.pad(scale, (0, 1)).transpose(0, 1).bfloat16().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.shape[0])
        return out if self.bias is None else out + self.bias

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in] with the weight. Return [T, out]."""
        rows = rows.contiguous()
        if rows.data_ptr() % _ALIGNMENT:
            rows = rows.clone()
        if self.bits == 8 and len(rows) > _MAX_INT8_ROWS:
            return functional.linear(rows, self._packed.to(rows.dtype)) * self._scale
        if self.bits == 8:
            return torch.ops.aten._weight_int8pack_mm(rows, self._packed, self._scale)  # type: ignore[no-any-return]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(  # type: ignore[no-any-return]
            rows, self._packed, self._group, self._scale
        )


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes what `torch.nn.Linear` does, and nothing else."""
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def quantize_model(model: Any, bits: int) -> None:
    """Quantize the linear layers of `model`. The LM head always has 8 bits.

    Raises:
        UnsupportedModel: torch lacks the operators, or the model has no layer that they support.
    """
    model_type = model.config.model_type
    lm_head = model.get_output_embeddings()
    if missing := [name for name in OPERATORS if not hasattr(torch.ops.aten, name)]:
        raise UnsupportedModel(
            f"this torch has no operator {missing[0]}, which --quantize needs; update torch, or leave --quantize out"
        )
    num_quantized = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            child_bits = 8 if child is lm_head else bits
            if is_linear(child) and QuantizedLinear.takes(child.weight, child_bits):
                setattr(module, name, QuantizedLinear(child.weight, child.bias, bits=child_bits))
                num_quantized += 1
    if not num_quantized:
        raise UnsupportedModel(f"{model_type}: it has no linear layer that can be quantized; leave --quantize out")
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    unquantized = [
        name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in embeddings
    ]
    if unquantized:
        names = ", ".join(unquantized[:3]) + ", ..." * (len(unquantized) > 3)
        count = len(unquantized)
        _log.warning("%s: %d weights cannot be quantized and keep their precision: %s", model_type, count, names)
