"""Quantized weights as the Triton kernels read them: FP8, and integers of 8 or 4 bits.

A weight is [N, K], and its values lie in rows. `fp8` (e4m3) and `int8` take a byte each; int8 is stored plus 128.
`int4` takes half a byte and is stored plus 8: 32 bytes hold 64 inputs, and byte j has input j in its low bits and input
j + 32 in its high bits. Scales, and zero points of integers, lie in [groups of inputs, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.torch.fp8_weight import Fp8, Fp8Weight
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.group_weight import Groups, GroupWeight
from outrider.models.torch.quantize import group_size, to_integers
from outrider.models.triton import gguf

_CHUNK = 64  # inputs that int4 packs together


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K]: (value - zero) * scale, or value * scale - zero if `zero` is float32."""

    kind: str  # "fp8", "int8" or "int4"
    shape: torch.Size
    values: torch.Tensor  # [N, K] uint8; int4: [N, 32 * ceil(K / 64)]
    scale: torch.Tensor  # [N] or [groups, ceil(N / scale_rows)] of any float dtype
    zero: torch.Tensor | None = None  # [groups, N]; of integers, where the middle of the values is 0
    group: int = 0  # inputs that share a scale: 32 or a multiple of 64; 0: all
    scale_rows: int = 1  # outputs that share a scale

    @property
    def nbytes(self) -> int:
        """Bytes of the values, scales and zero points."""
        return sum(each.nbytes for each in (self.values, self.scale, self.zero) if each is not None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields."""
        tensors = {"values": self.values, "scale": self.scale, "zero": self.zero}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on a device."""
        zero = None if self.zero is None else self.zero.to(device)
        return QuantizedWeight(
            kind=self.kind, shape=self.shape, values=self.values.to(device), scale=self.scale.to(device), zero=zero,
            group=self.group, scale_rows=self.scale_rows,
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        if self.kind == "fp8":
            values = self.values.view(torch.float8_e4m3fn).float()
        elif self.kind == "int8":
            values = self.values.float() - 128
        else:
            halves = self.values.view(len(self.values), -1, _CHUNK // 2)
            values = torch.cat([halves & 15, halves >> 4], -1).flatten(1)[:, : self.shape[1]].float() - 8
        if self.zero is None:
            return values * self._spread(self.scale)
        if self.zero.is_floating_point():
            return values * self._spread(self.scale) - self._spread(self.zero)
        return (values - self._spread(self.zero)) * self._spread(self.scale)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of groups for each weight, [N, K] or [N, 1] float32."""
        wide = numbers.float().repeat_interleave(self.scale_rows, -1)[..., : self.shape[0]]
        if not self.group:
            return wide[:, None]
        return wide.T.repeat_interleave(self.group, 1)[:, : self.shape[1]]


def from_fp8(weight: Fp8) -> QuantizedWeight:
    """Return a weight of FP8.

    Raises:
        UnsupportedModel: the blocks have no multiple of 64 inputs.
    """
    outputs, inputs = weight.values.shape
    rows, group = weight.block
    scale = weight.scale.float().T
    if group >= inputs:
        group = 0
        scale = scale.flatten().repeat_interleave(min(rows, outputs))[:outputs]
        rows = 1
    if group % _CHUNK:
        raise UnsupportedModel(
            f"FP8 with blocks of {group} inputs is not supported on a GPU; use a checkpoint with blocks of 128"
        )
    return QuantizedWeight(
        kind="fp8", shape=weight.values.shape, values=weight.values.contiguous().view(torch.uint8),
        scale=scale.contiguous(), group=group, scale_rows=rows,
    )  # fmt: skip


def from_groups(groups: Groups) -> QuantizedWeight:
    """Return the weight of a checkpoint with integers: AWQ, GPTQ or compressed-tensors.

    Raises:
        UnsupportedModel: the integers have other bits than 4 or 8, the groups are no multiple of 32 inputs, or their
            inputs are in another order.
    """
    layout = groups.layout
    inputs = layout.inputs
    whole = layout.group >= inputs
    if layout.index is not None and not whole:
        raise UnsupportedModel(
            "groups of inputs in another order (act-order, g_idx) are not supported on a GPU; use a checkpoint that was"
            " quantized with desc_act=False"
        )
    if layout.bits not in (4, 8) or (not whole and layout.group % 32):
        raise UnsupportedModel(
            f"{layout.bits}-bit integers in groups of {layout.group} inputs are not supported on a GPU; use a"
            " checkpoint with 4 or 8 bits and groups of 32, 64 or 128"
        )
    zero = None if groups.zero is None else groups.zero - layout.middle
    if whole and zero is None:
        return _integers(groups.values(), layout.bits, groups.scale.flatten(), None, 0)
    group = 128 if whole else layout.group
    repeats = -(-inputs // group) if whole else 1
    if group % _CHUNK:
        repeats = group // 32
        group = 32

    def spread(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.repeat_interleave(repeats, 1)[:, : -(-inputs // group)].T

    return _integers(groups.values(), layout.bits, spread(groups.scale), None if zero is None else spread(zero), group)


def from_blocks(weight: BlockWeight) -> QuantizedWeight:
    """Return the weight of a GGUF file with groups of 32 inputs: exactly, or to float32 if they have a minimum.

    Raises:
        UnsupportedModel: the blocks have another type.
    """
    if weight.kind not in gguf.KINDS:
        raise UnsupportedModel(
            f"GGUF weights of the type {weight.kind} do not stay quantized on a GPU; use {', '.join(gguf.KINDS)}"
        )
    values, bits, scale, minimum = gguf.read_integers(
        weight.kind, torch.from_numpy(np.ascontiguousarray(weight.rows()))
    )
    return _integers(values, bits, scale.T, None if minimum is None else minimum.T, gguf.GROUP)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantize a weight [N, K] to 8 or 4 bits, as `--quantize` does."""
    outputs, inputs = weight.shape
    group = group_size(inputs, bits)
    if inputs % group:
        raise OutriderError(f"a weight with {inputs} inputs cannot have 4 bits; use --quantize 8")
    values, scale = to_integers(weight, bits, group)
    unsigned = (values + (1 << bits - 1)).to(torch.uint8) if bits == 4 else values.view(torch.uint8) ^ 128
    scale = scale.view(outputs, -1).T.bfloat16()
    return _integers(unsigned, bits, scale.flatten() if bits == 8 else scale, None, 0 if bits == 8 else group)


def from_weight(weight: BlockWeight) -> QuantizedWeight:
    """Return the weight of a checkpoint or a GGUF file. Errors: as `from_fp8`, `from_groups` and `from_blocks`."""
    if isinstance(weight, Fp8Weight):
        return from_fp8(weight.fp8())
    return from_groups(weight.groups()) if isinstance(weight, GroupWeight) else from_blocks(weight)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of equal inputs as one, one above the other.

    Raises:
        UnsupportedModel: they are quantized in different ways.
    """
    first = parts[0]
    ways = {(part.kind, part.group, part.scale_rows, part.zero is None or part.zero.dtype) for part in parts}
    if len(ways) > 1 or (first.scale_rows > 1 and any(part.shape[0] % first.scale_rows for part in parts[:-1])):
        raise UnsupportedModel("its parts are quantized in different ways")
    zeros = [part.zero for part in parts if part.zero is not None]
    return replace(
        first,
        shape=torch.Size([sum(part.shape[0] for part in parts), first.shape[1]]),
        values=torch.cat([part.values for part in parts]),
        scale=torch.cat([part.scale for part in parts], -1),
        zero=torch.cat(zeros, -1) if zeros else None,
    )


def _integers(
    values: torch.Tensor, bits: int, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> QuantizedWeight:
    """Return a weight of integers [N, K] uint8."""
    shape = values.shape
    if bits == 4:
        padded = functional.pad(values, (0, -shape[1] % _CHUNK)).view(len(values), -1, 2, _CHUNK // 2)
        values = (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1)
    if zero is not None and not zero.is_floating_point():
        zero = zero.to(torch.int8 if bits == 4 else torch.int16)
    zero = None if zero is None else zero.contiguous()
    return QuantizedWeight(
        kind=f"int{bits}", shape=shape, values=values.contiguous(), scale=scale.contiguous(), zero=zero, group=group
    )
