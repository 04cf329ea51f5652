"""Pack weights into the layout of the native kernels, in memory that is backed by huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional

from outrider.cache.huge_pages import reserve
from outrider.native.abi import CLinear

PANEL = 32  # outputs that are computed together: kPanel of linear.h
GROUP = 64  # inputs that share a scale; input lengths are padded to a multiple of it
# The dtypes of weights that are not quantized, by bits per weight.
FLOAT_DTYPES: Mapping[int, torch.dtype] = MappingProxyType({32: torch.float32, 16: torch.bfloat16})
_HALF = PANEL // 2
_HUGE_PAGE = 1 << 21  # bytes
_CACHE_LINE = 64  # bytes
_CHUNK = 1 << 28  # bytes that are reserved at once


class Arena:
    """An allocator of tensors in huge pages. It never frees memory while it exists."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor in this memory."""
        if self._memory is None or self._used + tensor.nbytes > len(self._memory):
            # Pages that are never written take no physical memory, so a large chunk costs nothing.
            size = max(_CHUNK, _round_up(tensor.nbytes, _HUGE_PAGE))
            self._memory = reserve(size)
            self._used = 0
        out = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _round_up(tensor.nbytes, _CACHE_LINE)
        return out.view(tensor.shape).copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [outputs, inputs] in panels of 32 outputs: the layout of `Linear` in linear.h."""

    words: torch.Tensor  # [outputs / 32, inputs * bits / 32, 32] int32
    scale: torch.Tensor | None  # [outputs / 32, inputs / 64, 32] bfloat16; None for 32 and 16 bits
    bias: torch.Tensor | None  # [outputs] float32
    shape: tuple[int, int]  # without padding
    bits: int

    @property
    def nbytes(self) -> int:
        """Size in bytes, with padding."""
        return sum(tensor.nbytes for tensor in (self.words, self.scale, self.bias) if tensor is not None)

    def c(self) -> CLinear:
        """Return the structure for the kernels. It holds only addresses, so this object must outlive it."""
        return CLinear(
            weight=self.words.data_ptr(),
            scale=0 if self.scale is None else self.scale.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(),
            inputs=self.words.shape[1] * 32 // self.bits,
            outputs=self.shape[0],
            bits=self.bits,
        )


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int = 16, arena: Arena | None = None
) -> PackedWeight:
    """Pack a weight [outputs, inputs] for the kernels.

    Args:
        weight: [outputs, inputs] of any float dtype.
        bias: [outputs], or None.
        bits: 32 (float32), 16 (bfloat16), 8 or 4. With 8 and 4 the weight is quantized symmetrically, with one scale
            for each output and 64 inputs.
        arena: the memory of the result; None: an arena of its own.
    """
    arena = arena or Arena()
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, -inputs % GROUP, 0, -outputs % PANEL))
    if bits in FLOAT_DTYPES:
        values = padded.to(FLOAT_DTYPES[bits])
        scale = None
    else:
        values, scale = _quantize(padded, bits)
    return PackedWeight(
        words=arena.keep(_to_panels(_to_words(values, bits))),
        scale=None if scale is None else arena.keep(_to_panels(scale)),
        bias=None if bias is None else bias.float().contiguous(),
        shape=(outputs, inputs),
        bits=bits,
    )


def unpack(packed: PackedWeight) -> torch.Tensor:
    """Return the weight [outputs, inputs] that the kernels multiply with: bfloat16 if it has 16 bits, else float32."""
    words = packed.words.transpose(1, 2).reshape(-1, packed.words.shape[1]).contiguous()
    outputs, inputs = packed.shape
    if packed.scale is None:
        return words.view(FLOAT_DTYPES[packed.bits])[:outputs, :inputs]
    values = words.view(torch.uint8)
    if packed.bits == 4:
        words_of_bytes = values.view(len(values), -1, 4)
        values = torch.stack([words_of_bytes & 15, words_of_bytes >> 4], 2).reshape(len(values), -1)
    scale = packed.scale.transpose(1, 2).reshape(len(values), -1).float().repeat_interleave(GROUP, 1)
    return ((values.float() - (1 << (packed.bits - 1))) * scale)[:outputs, :inputs]


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of two weights [F, H]. Each panel holds 16 rows of `gate`, then the same 16 rows of `up`."""
    halves = [weight.view(-1, _HALF, weight.shape[1]) for weight in (gate, up)]
    return torch.stack(halves, 1).flatten(0, 2)


def separate(interleaved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up weights [F, H] from the result of `interleave`."""
    gate, up = interleaved.view(-1, 2, _HALF, interleaved.shape[1]).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def _quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [outputs, inputs] uint8 with an offset of half their range, and scales [outputs, inputs / 64]."""
    max_value = (1 << (bits - 1)) - 1
    groups = weight.float().view(len(weight), -1, GROUP)
    # The division uses the rounded scale, so that the rounding of the scale adds no error.
    scale = (groups.abs().amax(-1) / max_value).to(torch.bfloat16)
    scaled = groups / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    values = scaled.round().clamp(-max_value, max_value) + (max_value + 1)
    return values.to(torch.uint8).flatten(1), scale


def _to_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack values [outputs, inputs] into words [outputs, words] int32."""
    if bits == 4:
        eights = values.view(len(values), -1, 2, 4)
        values = (eights[:, :, 0] | (eights[:, :, 1] << 4)).flatten(1)
    return values.contiguous().view(torch.int32)


def _to_panels(rows: torch.Tensor) -> torch.Tensor:
    """Return a view [outputs / 32, n, 32] of rows [outputs, n]."""
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
