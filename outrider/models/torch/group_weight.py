"""Matrices of 4-bit or 8-bit integers with a scale for each group of inputs, as quantized checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from outrider.models.torch.gguf_linear import BlockWeight

GROUP_KINDS = frozenset({"int4", "int8"})
_PACKED_GROUPS = (64, 32)  # groups of the native kernels
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs in a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of a matrix of integers."""

    outputs: int
    inputs: int
    bits: int  # 8 or 4
    group: int  # inputs that share a scale; the number of inputs, or more: a scale for each output
    index: torch.Tensor | None = None  # [inputs] the group of each input; None: groups of consecutive inputs

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << (self.bits - 1)

    @property
    def packed_group(self) -> int:
        """The group of the native kernels, which is a part of a group of this matrix. 0: there is none."""
        if self.group >= self.inputs:
            return _PACKED_GROUPS[0]
        return next((group for group in _PACKED_GROUPS if self.group % group == 0), 0)

    @property
    def packable(self) -> bool:
        """Whether the kernels can multiply the matrix without loss."""
        if not self.packed_group or self.bits not in (4, 8):
            return False
        if self.index is None or self.group >= self.inputs:
            return True
        return bool((self.index.bincount() == self.group).all())

    def column_order(self) -> torch.Tensor | None:
        """Return the order [inputs] of inputs in which each group has consecutive ones. None: they have it already."""
        if self.index is None or bool((self.index.diff() >= 0).all()):
            return None
        return self.index.argsort(stable=True)

    def joins(self, other: Layout) -> bool:
        """Return whether both matrices can be one, above each other."""
        if (self.inputs, self.bits, self.group) != (other.inputs, other.bits, other.group):
            return False
        mine, others = self.column_order(), other.column_order()
        return mine is others if mine is None or others is None else torch.equal(mine, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A matrix of integers: weight = (value - zero) * scale, in float32."""

    layout: Layout
    words: torch.Tensor  # [outputs, inputs * bits / 32] int32, with consecutive integers from the lowest bits on
    scale: torch.Tensor  # [outputs, groups] of any float dtype
    zero: torch.Tensor | None = None  # [outputs, groups] int16; None: the middle of the integers
    # Whether the words are [inputs, outputs / 8] and have eight outputs of 4 bits in the order 0 2 4 6 1 3 5 7.
    by_input: bool = False

    def __post_init__(self) -> None:
        """Raise a ValueError if the tensors do not fit together."""
        layout = self.layout
        words = (layout.outputs, -(-layout.inputs * layout.bits // 32))
        if self.by_input:
            words = (layout.inputs, layout.outputs // 8)
        groups = (layout.outputs, -(-layout.inputs // layout.group))
        for name, tensor, shape in (("integers", self.words, words), ("scales", self.scale, groups)):
            if tensor.shape != shape:
                raise ValueError(f"its {name} have the shape {tuple(tensor.shape)} and not {shape}")
        if self.zero is not None and self.zero.shape != groups:
            raise ValueError(f"its zero points have the shape {tuple(self.zero.shape)} and not {groups}")

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [outputs, inputs] in float32."""
        zero = self.layout.middle if self.zero is None else self._spread(self.zero)
        return (self.values().float() - zero) * self._spread(self.scale)

    def values(self) -> torch.Tensor:
        """Return the integers [outputs, inputs] uint8."""
        if self.by_input:
            return in_order(unpack(self.words, 4)).T
        return unpack(self.words, self.layout.bits)[:, : self.layout.inputs]

    def select(self, rows: Any) -> Groups:
        """Return some rows of the matrix."""
        zero = None if self.zero is None else self.zero[rows]
        words = pack_integers(self.values()[rows], 4) if self.by_input else self.words[rows]
        layout = replace(self.layout, outputs=len(words))
        return Groups(layout=layout, words=words, scale=self.scale[rows], zero=zero)

    def zeros(self) -> torch.Tensor:
        """Return the zero points [outputs, groups]."""
        if self.zero is not None:
            return self.zero
        return torch.full(self.scale.shape, self.layout.middle, dtype=torch.int16)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of groups for each input, [outputs, inputs] float32."""
        if self.layout.index is not None:
            return numbers.float()[:, self.layout.index]
        return numbers.float().repeat_interleave(self.layout.group, 1)[:, : self.layout.inputs]


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers [..., 32 n / bits] uint8 of words [..., n] of any integers, from the lowest bits on."""
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], -1).flatten(-2)


def in_order(values: torch.Tensor) -> torch.Tensor:
    """Return values [n, outputs] with each eight outputs in their order, from the order 0 2 4 6 1 3 5 7."""
    return values.view(len(values), -1, 8)[:, :, _PLACES].flatten(1)


def pack_integers(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return words of integers [outputs, inputs] uint8, as `unpack` takes them."""
    values = functional.pad(values, (0, -values.shape[1] * bits % 32 // bits))
    values = values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)


class GroupWeight(BlockWeight):
    """A matrix of integers in a file. It is read when it is used."""

    def __init__(
        self, read: Callable[[], Groups], layout: Layout, nbytes: int, *, order: torch.Tensor | None = None
    ) -> None:
        """Refer to a matrix.

        Args:
            read: reads it from the file.
            layout: its sizes.
            nbytes: its bytes in the file.
            order: [outputs] the row of the file of each row; None: the same.
        """
        self._read = read
        self._nbytes = nbytes
        self._order = order
        self.layout = layout
        self.kind = f"int{layout.bits}"
        self.shape = torch.Size((layout.outputs, layout.inputs))
        self.release = lambda: None  # nothing is kept

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def groups(self) -> Groups:
        """Read the matrix."""
        groups = self._read()
        return groups if self._order is None else groups.select(self._order)

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        return self.groups().select(rows).dequantize()

    def reordered(self, order: torch.Tensor) -> GroupWeight:
        rows = order if self._order is None else self._order[order]
        return GroupWeight(self._read, self.layout, self._nbytes, order=rows)


def can_join(parts: Sequence[GroupWeight]) -> bool:
    """Return whether the kernels can multiply matrices, one above the other, without loss."""
    first = parts[0].layout
    return first.packable and all(part.layout.joins(first) for part in parts[1:])


def join(parts: Sequence[GroupWeight]) -> Groups:
    """Read matrices that `can_join` accepts, as one."""
    read = [part.groups() for part in parts]
    has_zeros = any(each.zero is not None for each in read)
    return Groups(
        layout=replace(read[0].layout, outputs=sum(each.layout.outputs for each in read)),
        words=read[0].words if len(read) == 1 else torch.cat([each.words for each in read], int(read[0].by_input)),
        scale=torch.cat([each.scale for each in read]),
        zero=torch.cat([each.zeros() for each in read]) if has_zeros else None,
        by_input=read[0].by_input,
    )
