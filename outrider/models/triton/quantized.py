"""Quantized weights as the Triton kernels read them: FP8, and integers of 8 or 4 bits.

A weight is [N, K], and its values lie in rows. `fp8` (e4m3) and `int8` take a byte each; int8 is stored plus 128.
`int4` takes half a byte and is stored plus 8: 32 bytes hold 64 inputs, and byte j has input j in its low bits and input
j + 32 in its high bits. `int6` takes 48 bytes for 64 inputs: as int4 for the lower bits, then 16 bytes. Byte j of
these has two bits of each of the inputs j, j + 32, j + 16 and j + 48, from the lowest bits on. It is stored plus 32.
Scales, and zero points of integers, lie in [groups of inputs, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from outrider.errors import OutriderError, UnsupportedModel, either
from outrider.models.torch.fp8_weight import Fp8, Fp8Weight
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.group_weight import Groups, GroupWeight
from outrider.models.torch.quantize import group_size, to_integers
from outrider.models.triton import gguf
from outrider.runtime.grouping import instances

_CHUNK = 64  # inputs that int4 and int6 pack together
_SUPER_GROUP = 256  # inputs that share a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K]: (value - zero) * scale, or value * scale - zero if `zero` is float32.

    With a factor, the scale is an integer times the factor, and `zero` is one times the second factor. It is what a
    stored 0 lacks: where the middle is stored as 8, the weight is (value + 8) * scale - zero.
    """

    kind: str  # "fp8", "int8", "int6" or "int4"
    shape: torch.Size
    values: torch.Tensor  # [N, K] uint8; int4: [N, 32 * ceil(K / 64)]; int6: [N, 48 * ceil(K / 64)]
    scale: torch.Tensor  # [N] or [groups, ceil(N / scale_rows)] of any float dtype; with a factor [groups, N] int8
    zero: torch.Tensor | None = None  # [groups, N]; of integers, where the middle of the values is 0
    factor: torch.Tensor | None = None  # [K / 256, N] float16; with `zero` [2 K / 256, N], that of `zero` after each
    group: int = 0  # inputs that share a scale: 16 (int4 and int6), 32 or a multiple of 64; 0: all
    scale_rows: int = 1  # outputs that share a scale

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return int(self.kind[3:]) if self.kind.startswith("int") else 8

    @property
    def nbytes(self) -> int:
        """Bytes of the values, scales, zero points and factors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields."""
        tensors = {"values": self.values, "scale": self.scale, "zero": self.zero, "factor": self.factor}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def dequantize(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        values = self._numbers()
        if self.zero is None:
            return values * self._spread(self._scale())
        if self.factor is not None:
            minimum = self.zero.float() * self._factors(1)
            return (values + (1 << self.bits - 1)) * self._spread(self._scale()) - self._spread(minimum)
        if self.zero.is_floating_point():
            return values * self._spread(self.scale) - self._spread(self.zero)
        return (values - self._spread(self.zero)) * self._spread(self.scale)

    def _numbers(self) -> torch.Tensor:
        """Return the values [N, K] without scales in float32."""
        if self.kind == "fp8":
            return self.values.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return self.values.float() - 128
        chunks = self.values.view(len(self.values), -1, self.bits * _CHUNK // 8)
        low = chunks[..., : _CHUNK // 2]
        values = torch.cat([low & 15, low >> 4], -1)
        if self.kind == "int6":
            values |= torch.cat([(chunks[..., _CHUNK // 2 :] >> 2 * i & 3) << 4 for i in (0, 2, 1, 3)], -1)
        return values.flatten(1)[:, : self.shape[1]].float() - (1 << self.bits - 1)

    def _scale(self) -> torch.Tensor:
        """Return the scales with their factors."""
        return self.scale if self.factor is None else self.scale.float() * self._factors(0)

    def _factors(self, number: int) -> torch.Tensor:
        """Return the factor of each group: 0 those of the scales, 1 those of the zero points. [groups, N] float32."""
        assert self.factor is not None
        step = 1 if self.zero is None else 2
        return self.factor[number::step].float().repeat_interleave(_SUPER_GROUP // self.group, 0)

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
    """Return the weight of a GGUF file: exactly, or to float32 if its groups have a minimum.

    Raises:
        UnsupportedModel: the blocks have another type.
    """
    if weight.kind not in gguf.BITS:
        raise UnsupportedModel(
            f"GGUF weights of the type {weight.kind} do not stay quantized on a GPU; use {either(gguf.BITS)}"
        )
    read = gguf.read_integers(weight.kind, torch.from_numpy(np.ascontiguousarray(weight.rows())))
    tables = {"scale": read.scale, "zero": read.minimum, "factor": read.factor}
    turned: dict[str, Any] = {name: table.T.contiguous() for name, table in tables.items() if table is not None}
    return QuantizedWeight(
        kind=f"int{read.bits}", shape=read.values.shape, values=_packed(read.values, read.bits),
        group=read.values.shape[1] // read.scale.shape[1], **turned,
    )  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Weights of equal inputs, one above the other, which are stored in different ways."""

    parts: tuple[torch.Tensor | QuantizedWeight, ...]  # [N, K] each

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all parts by name."""
        named: dict[str, torch.Tensor] = {}
        for i, part in enumerate(self.parts):
            fields = {"values": part} if isinstance(part, torch.Tensor) else part.tensors()
            named |= {f"{i}.{name}": tensor for name, tensor in fields.items()}
        return named

    def dequantize(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        parts = [part if isinstance(part, torch.Tensor) else part.dequantize() for part in self.parts]
        return torch.cat([part.float() for part in parts])


Matrix = torch.Tensor | QuantizedWeight | JoinedWeight  # [N, K]


def stacked(parts: Sequence[torch.Tensor | QuantizedWeight]) -> Matrix:
    """Return weights of equal inputs as one, one above the other. Neighbors of the same type are one matrix."""
    joined: list[torch.Tensor | QuantizedWeight] = []
    for _, alike in groupby(parts, _way):
        group = list(alike)
        if isinstance(group[0], torch.Tensor):
            joined.append(torch.cat(instances(group, torch.Tensor)))
        else:
            joined.extend(_stacked(instances(group, QuantizedWeight)))
    return joined[0] if len(joined) == 1 else JoinedWeight(tuple(joined))


def _way(part: torch.Tensor | QuantizedWeight) -> tuple[Any, ...]:
    """Return how a weight is stored."""
    if isinstance(part, torch.Tensor):
        return (part.dtype,)
    types = tuple(tensor.dtype for tensor in part.tensors().values())
    return (part.kind, part.group, part.scale_rows, part.zero is None, part.factor is None, types)


def _stacked(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return weights that are stored in the same way as one; as they are if their scales share rows of two parts."""
    first = parts[0]
    if any(part.shape[0] % first.scale_rows for part in parts[:-1]):
        return parts
    tables: dict[str, Any] = {}
    for name in first.tensors():
        tensors = [part.tensors()[name] for part in parts]
        tables[name] = torch.cat(tensors, 0 if name == "values" else -1)
    outputs = sum(part.shape[0] for part in parts)
    return [replace(first, shape=torch.Size([outputs, first.shape[1]]), **tables)]


def _integers(
    values: torch.Tensor, bits: int, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> QuantizedWeight:
    """Return a weight of integers [N, K] uint8."""
    if zero is not None:
        zero = zero.to(torch.int8 if bits == 4 else torch.int16).contiguous()
    return QuantizedWeight(
        kind=f"int{bits}", shape=values.shape, values=_packed(values, bits), scale=scale.contiguous(), zero=zero,
        group=group,
    )  # fmt: skip


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bytes of integers [N, K] uint8."""
    if bits == 8:
        return values.contiguous()
    chunks = functional.pad(values, (0, -values.shape[1] % _CHUNK)).view(len(values), -1, _CHUNK)
    first, second = chunks.chunk(2, -1)
    packed = first & 15 | second << 4
    if bits == 6:
        high = chunks.unflatten(-1, (4, _CHUNK // 4)) >> 4 << torch.tensor([[0], [4], [2], [6]], dtype=torch.uint8)
        packed = torch.cat([packed, high.sum(-2, dtype=torch.uint8)], -1)
    return packed.flatten(1)
