"""Weights in the order in which the kernels read them, in memory that costs few look-ups to address."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional

from outrider.cache.huge_pages import reserve
from outrider.native.abi import CLinear

PANEL = 32  # outputs that are computed together
GROUP = 64  # inputs that share a scale; the length of an input is padded to a multiple of it
WHOLE: Mapping[int, torch.dtype] = MappingProxyType({32: torch.float32, 16: torch.bfloat16})  # by bits
_HALF = PANEL // 2
_PAGE, _LINE = 1 << 21, 64  # bytes of a huge page and of a cache line
_CHUNK = 1 << 28  # bytes


class Arena:
    """Memory in huge pages, for what is kept."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy in here."""
        if self._memory is None or self._used + tensor.nbytes > len(self._memory):
            # What is not written to takes no memory, so a generous size costs nothing.
            size = max(_CHUNK, -(-tensor.nbytes // _PAGE) * _PAGE)
            self._memory, self._used = reserve(size), 0
        out = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-tensor.nbytes // _LINE) * _LINE
        return out.view(tensor.shape).copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [outputs, inputs] in panels of 32 outputs."""

    words: torch.Tensor  # [outputs / 32, inputs * bits / 32, 32] int32
    scale: torch.Tensor | None  # [outputs / 32, inputs / 64, 32] bfloat16; None for 32 and 16 bits
    bias: torch.Tensor | None  # [outputs] float32
    shape: tuple[int, int]  # without padding
    bits: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scale, self.bias) if part is not None)

    def c(self) -> CLinear:
        """As the kernels take it; this must outlive the structure, which holds addresses alone."""
        scale, bias = (0 if part is None else part.data_ptr() for part in (self.scale, self.bias))
        inputs = self.words.shape[1] * 32 // self.bits
        return CLinear(self.words.data_ptr(), scale, bias, inputs, self.shape[0], self.bits)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int = 16, arena: Arena | None = None
) -> PackedWeight:
    """Pack [outputs, inputs] in float32, bfloat16, or quantised: symmetric, one scale for each output and 64 inputs."""
    arena = arena or Arena()
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, -inputs % GROUP, 0, -outputs % PANEL))
    if bits in WHOLE:
        parts, scale = padded.to(WHOLE[bits]), None
    else:
        parts, scale = _quantise(padded, bits)
    return PackedWeight(
        words=arena.keep(_panels(_words(parts, bits))),
        scale=None if scale is None else arena.keep(_panels(scale)),
        bias=None if bias is None else bias.float().contiguous(),
        shape=(outputs, inputs),
        bits=bits,
    )


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight [outputs, inputs] that the kernels multiply by, in bfloat16 where it has 16 bits, else in float32."""
    words = packed.words.transpose(1, 2).reshape(-1, packed.words.shape[1]).contiguous()
    outputs, inputs = packed.shape
    if packed.scale is None:
        return words.view(WHOLE[packed.bits])[:outputs, :inputs]
    values = words.view(torch.uint8)
    if packed.bits == 4:
        quads = values.view(len(values), -1, 4)
        values = torch.stack([quads & 15, quads >> 4], 2).reshape(len(values), -1)
    scale = packed.scale.transpose(1, 2).reshape(len(values), -1).float().repeat_interleave(GROUP, 1)
    return ((values.float() - (1 << (packed.bits - 1))) * scale)[:outputs, :inputs]


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of both [F, H] so that each panel holds 16 of the one and then the same 16 of the other."""
    return torch.stack([part.view(-1, _HALF, part.shape[1]) for part in (gate, up)], 1).flatten(0, 2)


def separate(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `interleave`."""
    gate, up = both.view(-1, 2, _HALF, both.shape[1]).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def _quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned integers [outputs, inputs] uint8, shifted by half their range, and scales [outputs, inputs / 64]."""
    most = (1 << (bits - 1)) - 1
    groups = weight.float().view(len(weight), -1, GROUP)
    # Rounded before it is divided by, so that its own rounding costs nothing.
    scale = (groups.abs().amax(-1) / most).to(torch.bfloat16)
    steps = groups / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    values = steps.round().clamp(-most, most) + (most + 1)
    return values.to(torch.uint8).flatten(1), scale


def _words(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """[outputs, words] int32 from what they are made of."""
    if bits == 4:
        quads = parts.view(len(parts), -1, 2, 4)
        parts = (quads[:, :, 0] | (quads[:, :, 1] << 4)).flatten(1)
    return parts.contiguous().view(torch.int32)


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, n] -> [outputs / 32, n, 32]."""
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2)
