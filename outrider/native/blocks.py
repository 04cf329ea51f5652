"""Pack the quantized blocks of GGUF files for the kernels, without loss.

A block type becomes integers of 8 or 4 bits with a scale, and for some types a minimum, for each group of 32 or 16
inputs: weight = (integer - offset) * scale + minimum. In types of two levels, scale and minimum are a half float of 256
inputs times a small integer of the group. The layout of each type is that of ggml-quants.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.gguf_linear import BlockWeight
from outrider.native.abi import CLinear
from outrider.native.pack import GROUP, PANEL, Arena, address, from_panels, integers, to_panels, to_words

_SUPER_BLOCK = 256  # inputs that share the half floats of a type of two levels
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """The contents of a matrix [outputs, inputs] in blocks."""

    values: _Bytes  # [outputs, inputs]
    bits: int
    group: int
    offset: int
    scale: NDArray[np.float16]  # [outputs, groups], or [outputs, inputs / 256] with two levels
    minimum: NDArray[np.float16] | None = None  # the same
    sub_scale: NDArray[np.int8] | None = None  # [outputs, groups] with two levels
    sub_minimum: NDArray[np.int8] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """A matrix of GGUF blocks in panels of 32 outputs."""

    words: torch.Tensor  # [outputs / 32, inputs * bits / 32, 32] int32
    scale: torch.Tensor  # [outputs / 32, groups or super-blocks, 32] float16
    minimum: torch.Tensor | None  # the same
    sub_scale: torch.Tensor | None  # [outputs / 32, groups, 32] int8
    sub_minimum: torch.Tensor | None  # the same
    bias: torch.Tensor | None  # [outputs] float32
    shape: tuple[int, int]  # without padding
    bits: int
    group: int
    offset: int

    @property
    def nbytes(self) -> int:
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))

    def c(self) -> CLinear:
        """Return the structure of the kernels. It holds addresses only, so this object must outlive it."""
        return CLinear(
            weight=self.words.data_ptr(),
            scale=self.scale.data_ptr(),
            minimum=address(self.minimum),
            sub_scale=address(self.sub_scale),
            sub_minimum=address(self.sub_minimum),
            bias=address(self.bias),
            inputs=self.words.shape[1] * 32 // self.bits,
            outputs=self.shape[0],
            bits=self.bits,
            group=self.group,
            offset=self.offset,
        )

    def unpack(self) -> torch.Tensor:
        """Return the weight [outputs, inputs] in float32, exactly."""
        outputs, inputs = self.shape
        weight = (integers(self.words, self.bits).float() - self.offset) * self._by_input(self.scale, self.sub_scale)
        if self.minimum is not None:
            weight += self._by_input(self.minimum, self.sub_minimum)
        return weight[:outputs, :inputs]

    def _by_input(self, value: torch.Tensor, sub_value: torch.Tensor | None) -> torch.Tensor:
        """Return scales or minima [padded outputs, padded inputs] in float32."""
        wide = from_panels(value).float()
        if sub_value is None:
            return wide.repeat_interleave(self.group, 1)
        by_group = wide.repeat_interleave(_SUPER_BLOCK // self.group, 1) * from_panels(sub_value).float()
        return by_group.repeat_interleave(self.group, 1)


def can_pack(kind: str) -> bool:
    """Return whether the kernels multiply a GGUF type, such as "Q4_K", as it is."""
    return kind in _READERS


def join_blocks(parts: Sequence[BlockWeight], order: torch.Tensor | None = None) -> BlockWeight:
    """Stack matrices of one type, one above the other, with the rows in another order if `order` is given."""
    data = np.concatenate([part.data for part in parts])
    joined = BlockWeight(data, parts[0].kind, parts[0].shape[1])
    return joined if order is None else joined.reordered(order)


def pack_blocks(weight: BlockWeight, bias: torch.Tensor | None = None, *, arena: Arena | None = None) -> PackedBlocks:
    """Pack a matrix of a type that `can_pack` accepts."""
    arena = arena or Arena()
    outputs, inputs = weight.shape
    blocks = _READERS[weight.kind](weight.data)
    pad_rows = -outputs % PANEL
    padding = -inputs % GROUP

    def padded(matrix: NDArray[np.generic], per_input: int) -> torch.Tensor:
        """Add rows and columns of zeros. A column of `matrix` belongs to `per_input` inputs."""
        return torch.from_numpy(np.pad(matrix, ((0, pad_rows), (0, padding // per_input))))

    def kept(matrix: NDArray[np.generic] | None, per_input: int) -> torch.Tensor | None:
        return None if matrix is None else arena.keep(to_panels(padded(matrix, per_input)))

    two_level = blocks.sub_scale is not None
    per_scale = _SUPER_BLOCK if two_level else blocks.group
    scale = kept(blocks.scale, per_scale)
    assert scale is not None
    return PackedBlocks(
        words=arena.keep(to_panels(to_words(padded(blocks.values, 1), blocks.bits))),
        scale=scale,
        minimum=kept(blocks.minimum, per_scale),
        sub_scale=kept(blocks.sub_scale, blocks.group),
        sub_minimum=kept(blocks.sub_minimum, blocks.group),
        bias=None if bias is None else bias.float().contiguous(),
        shape=(outputs, inputs),
        bits=blocks.bits,
        group=blocks.group,
        offset=blocks.offset,
    )


def _split(data: _Bytes, *sizes: int) -> list[_Bytes]:
    """Cut the blocks of `data` [outputs, bytes] into fields [outputs, blocks, size]."""
    blocks = data.reshape(len(data), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=2)


def _half(field: _Bytes) -> NDArray[np.float16]:
    """[outputs, blocks, 2] -> [outputs, blocks]."""
    return np.ascontiguousarray(field).view(np.float16)[..., 0]


def _flat(values: NDArray[np.generic]) -> _Bytes:
    """[outputs, ...] -> [outputs, inputs]."""
    return np.ascontiguousarray(values.reshape(len(values), -1)).astype(np.uint8, copy=False)


def _nibbles(field: _Bytes) -> _Bytes:
    """[outputs, blocks, n] -> [outputs, blocks, 2n]: the low halves of all bytes, then the high ones."""
    return np.concatenate([field & 15, field >> 4], axis=2)


def _fifth_bits(field: _Bytes) -> _Bytes:
    """[outputs, blocks, 4] -> [outputs, blocks, 32]: the bits, shifted to the place of the fifth."""
    return np.unpackbits(field, axis=2, bitorder="little") << np.uint8(4)


def _q8_0(data: _Bytes) -> _Blocks:
    scale, values = _split(data, 2, 32)
    return _Blocks(values=_flat(values ^ 128), bits=8, group=32, offset=128, scale=_half(scale))


def _q4_0(data: _Bytes) -> _Blocks:
    scale, values = _split(data, 2, 16)
    return _Blocks(values=_flat(_nibbles(values)), bits=4, group=32, offset=8, scale=_half(scale))


def _q4_1(data: _Bytes) -> _Blocks:
    scale, minimum, values = _split(data, 2, 2, 16)
    return _Blocks(
        values=_flat(_nibbles(values)), bits=4, group=32, offset=0, scale=_half(scale), minimum=_half(minimum)
    )


def _q5_0(data: _Bytes) -> _Blocks:
    scale, high, low = _split(data, 2, 4, 16)
    return _Blocks(values=_flat(_nibbles(low) | _fifth_bits(high)), bits=8, group=32, offset=16, scale=_half(scale))


def _q5_1(data: _Bytes) -> _Blocks:
    scale, minimum, high, low = _split(data, 2, 2, 4, 16)
    values = _flat(_nibbles(low) | _fifth_bits(high))
    return _Blocks(values=values, bits=8, group=32, offset=0, scale=_half(scale), minimum=_half(minimum))


def _q4_k(data: _Bytes) -> _Blocks:
    scale, minimum, packed, low = _split(data, 2, 2, 12, 128)
    values = _nibbles(low.reshape(*low.shape[:2], 4, 32).reshape(len(low), -1, 32))
    return _two_level(values, 4, scale, minimum, packed)


def _q5_k(data: _Bytes) -> _Blocks:
    scale, minimum, packed, high, low = _split(data, 2, 2, 12, 32, 128)
    values = _nibbles(low.reshape(len(low), -1, 32)).reshape(*low.shape[:2], 8, 32)
    fifth = (high[:, :, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _two_level(values | fifth << np.uint8(4), 8, scale, minimum, packed)


def _two_level(values: _Bytes, bits: int, scale: _Bytes, minimum: _Bytes, packed: _Bytes) -> _Blocks:
    sub_scale, sub_minimum = _six_bits(packed)
    return _Blocks(
        values=_flat(values),
        bits=bits,
        group=32,
        offset=0,
        scale=_half(scale),
        minimum=-_half(minimum),
        sub_scale=sub_scale,
        sub_minimum=sub_minimum,
    )


def _six_bits(packed: _Bytes) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return the scales and minima [outputs, groups] of 12 bytes for 8 groups, each of 6 bits."""
    first, second, third = np.split(packed, 3, axis=2)
    scales = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=2)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=2)
    return _flat(scales).view(np.int8), _flat(minima).view(np.int8)


def _q6_k(data: _Bytes) -> _Blocks:
    low, high, sub_scale, scale = _split(data, 128, 64, 16, 2)
    halves = _nibbles(low.reshape(len(low), -1, 64)).reshape(len(low), -1, 4, 32)
    pairs = high.reshape(len(high), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return _Blocks(
        values=_flat(halves | pairs << 4),
        bits=8,
        group=16,
        offset=32,
        scale=_half(scale),
        sub_scale=_flat(sub_scale).view(np.int8),
    )


_READERS: Mapping[str, Callable[[_Bytes], _Blocks]] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
