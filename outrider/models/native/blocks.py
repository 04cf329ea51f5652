"""Pack quantized weights for the kernels, without loss: the blocks of GGUF files, and integers with scales of groups.

Each type keeps its codes of 2 to 8 bits, with a scale, and for some types a minimum, for each group
of 32 or 16 inputs: weight = (value - offset) * scale + minimum. The value is the code or the entry
of a table. In types of two levels, scale and minimum are a half float of 256 inputs times a small
integer of the group. The kernels read the blocks where they are, in the mapped file (blocks.cpp).
Integers of 8 or 4 bits may have a zero point for each group as well.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from outrider.models.native.arena import Arena
from outrider.models.native.library import load_library
from outrider.models.native.pack import GROUP, PANEL, PackedWeight, to_panels, unpack
from outrider.models.native.structures import CBlockMatrix, CLinear, address
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.group_weight import Groups, GroupWeight, can_join, join, pack_integers
from outrider.runtime.grouping import instances

_BYTE = torch.iinfo(torch.int8)
_SUPER_BLOCK = 256  # inputs that share the half floats of a type of two levels
_NUMBERS: Mapping[torch.dtype, int] = MappingProxyType(  # `Number` of weights.h
    {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}
)


class _Values(IntEnum):
    """What the stored bits of a weight mean, as in weights.h."""

    PLAIN = 0
    IQ4 = 1
    FP4 = 2
    HALF = 3


class _Format(NamedTuple):
    """The packed form of a type's blocks, as in blocks.cpp."""

    bits: int
    group: int
    offset: int
    has_minimum: bool = False
    two_levels: bool = False
    values: _Values = _Values.PLAIN
    scale_dtype: torch.dtype = torch.float16


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "F16": _Format(16, GROUP, 0, values=_Values.HALF),
        "Q8_0": _Format(8, 32, 128),
        "Q4_0": _Format(4, 32, 8),
        "Q4_1": _Format(4, 32, 0, has_minimum=True),
        "Q5_0": _Format(5, 32, 16),
        "Q5_1": _Format(5, 32, 0, has_minimum=True),
        "Q2_K": _Format(2, 16, 0, has_minimum=True, two_levels=True),
        "Q3_K": _Format(3, 16, 4, two_levels=True),
        "Q4_K": _Format(4, 32, 0, has_minimum=True, two_levels=True),
        "Q5_K": _Format(5, 32, 0, has_minimum=True, two_levels=True),
        "Q6_K": _Format(6, 16, 32, two_levels=True),
        "IQ4_NL": _Format(4, 32, 128, values=_Values.IQ4),
        "IQ4_XS": _Format(4, 32, 128, two_levels=True, values=_Values.IQ4),
        "MXFP4": _Format(4, 32, 12, values=_Values.FP4, scale_dtype=torch.uint8),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """A matrix of GGUF blocks, or of integers with scales of groups, in panels of 32 outputs."""

    words: torch.Tensor  # [outputs / 32, inputs * bits / 32, 32] int32
    scale: torch.Tensor | None  # [outputs / 32, groups or super-blocks, 32] of any dtype of _NUMBERS; None for F16
    minimum: torch.Tensor | None  # the same
    sub_scale: torch.Tensor | None  # [outputs / 32, groups, 32] int8
    sub_minimum: torch.Tensor | None  # the same; None for Q2_K, whose `sub_scale` holds both
    bias: torch.Tensor | None  # [outputs] float32
    shape: tuple[int, int]  # without padding
    bits: int
    group: int
    offset: int
    values: _Values = _Values.PLAIN
    zero: torch.Tensor | None = None  # [outputs / 32, groups, 32] int8, added to the offset
    order: torch.Tensor | None = None  # [inputs] int32, the input of each column; None: they are in order

    @property
    def nbytes(self) -> int:
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))

    def c(self) -> CLinear:
        """Return the structure of the kernels. It holds addresses only, so this object must outlive it."""
        return CLinear(
            weight=self.words.data_ptr(),
            scale=address(self.scale),
            minimum=address(self.minimum),
            sub_scale=address(self.sub_scale),
            sub_minimum=address(self.sub_minimum),
            zero=address(self.zero),
            order=address(self.order),
            bias=address(self.bias),
            inputs=self.words.shape[1] * 32 // self.bits,
            outputs=self.shape[0],
            bits=self.bits,
            group=self.group,
            offset=self.offset,
            values=self.values,
            number=0 if self.scale is None else _NUMBERS[self.scale.dtype],
        )

    def unpack(self) -> torch.Tensor:
        """Return the weight [outputs, inputs] in float32, exactly."""
        return unpack(self.c(), self.shape)


PackedMatrix = PackedWeight | PackedBlocks


def can_pack(kind: str) -> bool:
    """Return whether the kernels multiply a GGUF type, such as "Q4_K", without conversion."""
    return kind in _FORMATS


def can_pack_together(parts: Sequence[BlockWeight]) -> bool:
    """Return whether the kernels multiply matrices, one above the other, without conversion."""
    if all(isinstance(part, GroupWeight) for part in parts):
        return can_join(instances(parts, GroupWeight))
    return len({part.kind for part in parts}) == 1 and can_pack(parts[0].kind)


def half_blocks(matrix: torch.Tensor) -> BlockWeight:
    """Return a float16 matrix [rows, columns] as blocks of the type F16."""
    return BlockWeight(matrix.contiguous().view(torch.uint8).numpy(), "F16", matrix.shape[1])


def pack_blocks(
    parts: Sequence[BlockWeight],
    bias: torch.Tensor | None = None,
    *,
    order: torch.Tensor | None = None,
    arena: Arena | None = None,
) -> PackedBlocks:
    """Pack matrices that `can_pack_together` accepts, one above the other.

    Args:
        parts: the matrices.
        bias: [outputs] of all of them, or None.
        order: [outputs] the row of each output, if they are in another order.
        arena: the memory of the result; None: an arena of its own.
    """
    arena = arena or Arena()
    groups_of = instances(parts, GroupWeight)
    if groups_of:
        return _pack_groups(join(groups_of), bias, order=order, arena=arena)
    inputs = parts[0].shape[1]
    form = _FORMATS[parts[0].kind]
    addresses = np.concatenate([part.addresses() for part in parts])
    if order is not None:
        addresses = addresses[order.numpy()]
    panels = -(-len(addresses) // PANEL)
    padded = -(-inputs // GROUP) * GROUP
    groups = padded // form.group
    scales = padded // _SUPER_BLOCK if form.two_levels else groups

    def zeros(count: int, dtype: torch.dtype, *, wanted: bool = True) -> torch.Tensor | None:
        return arena.zeros((panels, count, PANEL), dtype) if wanted else None

    words = arena.zeros((panels, padded * form.bits // 32, PANEL), torch.int32)
    packed = PackedBlocks(
        words=words,
        scale=zeros(scales, form.scale_dtype, wanted=form.values != _Values.HALF),
        minimum=zeros(scales, torch.float16, wanted=form.has_minimum),
        sub_scale=zeros(groups, torch.int8, wanted=form.two_levels),
        sub_minimum=zeros(groups, torch.int8, wanted=form.two_levels and form.has_minimum and form.bits > 2),
        bias=None if bias is None else bias.float().contiguous(),
        shape=(len(addresses), inputs),
        bits=form.bits,
        group=form.group,
        offset=form.offset,
        values=form.values,
    )
    matrix = CBlockMatrix(
        row=addresses.ctypes.data,
        words=words.data_ptr(),
        scale=address(packed.scale),
        minimum=address(packed.minimum),
        sub_scale=address(packed.sub_scale),
        sub_minimum=address(packed.sub_minimum),
        inputs=inputs,
        outputs=len(addresses),
    )
    load_library().code.outrider_pack_blocks(parts[0].kind.encode(), ctypes.byref(matrix))
    for part in parts:
        part.release()
    return packed


def _pack_groups(
    weight: Groups, bias: torch.Tensor | None, *, order: torch.Tensor | None, arena: Arena
) -> PackedBlocks:
    """Pack integers with scales of groups. The arguments are those of `pack_blocks`.

    A group of the kernels is a part of a group of the matrix, and has the same scale.
    """
    layout = weight.layout
    inputs, bits, group = layout.inputs, layout.bits, layout.packed_group
    rows = torch.arange(layout.outputs) if order is None else order
    panels = -(-layout.outputs // PANEL)
    padded = -(-inputs // GROUP) * GROUP
    columns = layout.column_order()
    words = _rows_of_words(weight, columns).contiguous()
    addresses = (words.data_ptr() + rows.numpy() * words.stride(0) * words.itemsize).astype(np.uint64)
    packed = arena.zeros((panels, padded * bits // 32, PANEL), torch.int32)
    matrix = CBlockMatrix(row=addresses.ctypes.data, words=packed.data_ptr(), inputs=inputs, outputs=len(addresses))
    load_library().code.outrider_pack_integers(ctypes.byref(matrix), bits)
    offset = layout.middle
    zero = weight.zero
    if zero is not None:
        offset += int(zero.max() - offset > _BYTE.max)  # so that zero points up to 256 fit
        zero = (zero - offset).to(torch.int8)

    def by_group(numbers: torch.Tensor) -> torch.Tensor:
        wide = numbers[rows].repeat_interleave(-(-layout.group // group), 1)[:, : padded // group]
        missing = (0, padded // group - wide.shape[1], 0, panels * PANEL - layout.outputs)
        return arena.keep(to_panels(functional.pad(wide, missing)))

    return PackedBlocks(
        words=packed,
        scale=by_group(weight.scale),
        minimum=None,
        sub_scale=None,
        sub_minimum=None,
        bias=None if bias is None else bias.float().contiguous(),
        shape=(layout.outputs, inputs),
        bits=bits,
        group=group,
        offset=offset,
        zero=None if zero is None else by_group(zero),
        order=None if columns is None else columns.to(torch.int32),
    )


def _rows_of_words(weight: Groups, columns: torch.Tensor | None) -> torch.Tensor:
    """Return words [outputs, inputs * bits / 32] of consecutive inputs, in the order `columns` if there is one."""
    layout = weight.layout
    if columns is None and not weight.by_input:
        return weight.words
    if columns is not None or layout.inputs % 8:
        values = weight.values()
        return pack_integers(values if columns is None else values[:, columns], layout.bits)
    words = torch.empty(layout.outputs, layout.inputs // 8, dtype=torch.int32)
    source = weight.words.contiguous()
    load_library().code.outrider_transpose_integers(
        source.data_ptr(), words.data_ptr(), layout.inputs, layout.outputs // 8
    )
    return words


def dequantize_blocks(kind: str, addresses: NDArray[np.uint64], columns: int) -> torch.Tensor | None:
    """Return rows of blocks [R, columns] in float32, exactly; None: the kernels do not know the type.

    Args:
        kind: the type.
        addresses: [R] of the rows.
        columns: values of a row.
    """
    if not can_pack(kind):
        return None
    addresses = np.ascontiguousarray(addresses)
    dense = torch.empty(len(addresses), columns)
    matrix = CBlockMatrix(row=addresses.ctypes.data, dense=dense.data_ptr(), inputs=columns, outputs=len(addresses))
    load_library().code.outrider_dequantize(kind.encode(), ctypes.byref(matrix))
    return dense
