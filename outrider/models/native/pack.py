"""Pack weights into the layout of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.nn import functional

from outrider.models.native.arena import Arena, Refill
from outrider.models.native.library import load_library
from outrider.models.native.structures import CLinear, address

PANEL = 32  # outputs that are computed together: kPanel of weights.h
GROUP = 64  # inputs that share a scale; input lengths are padded to a multiple of it
# The dtypes of weights that are not quantized, by bits per weight.
FLOAT_DTYPES: Mapping[int, torch.dtype] = MappingProxyType({32: torch.float32, 16: torch.bfloat16})
_HALF = PANEL // 2
_VALUES_AT_ONCE = 1 << 20  # of a weight that is packed: 4 MiB of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [outputs, inputs] in panels of 32 outputs: the layout of `Linear` in weights.h."""

    words: torch.Tensor  # [outputs / 32, inputs * bits / 32, 32] int32
    scale: torch.Tensor | None  # [outputs / 32, inputs / 64, 32] bfloat16; None for 32 and 16 bits
    minimum: torch.Tensor | None  # the same; None unless the weight has 4 bits
    bias: torch.Tensor | None  # [outputs] float32
    shape: tuple[int, int]  # without padding
    bits: int

    @property
    def nbytes(self) -> int:
        """Size in bytes, with padding."""
        tensors = (self.words, self.scale, self.minimum, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def c(self) -> CLinear:
        """Return the structure for the kernels. It holds only addresses, so this object must outlive it."""
        return CLinear(
            weight=self.words.data_ptr(),
            scale=address(self.scale),
            minimum=address(self.minimum),
            bias=address(self.bias),
            inputs=self.words.shape[1] * 32 // self.bits,
            outputs=self.shape[0],
            bits=self.bits,
            group=GROUP,
            offset=self._offset,
        )

    def unpack(self) -> torch.Tensor:
        """Return the weight [outputs, inputs] of the kernels: bfloat16 if it has 16 bits, else float32."""
        outputs, inputs = self.shape
        if self.scale is None:
            rows = self.words.transpose(1, 2).reshape(-1, self.words.shape[1]).contiguous()
            return rows.view(FLOAT_DTYPES[self.bits])[:outputs, :inputs]
        return unpack(self.c(), self.shape)

    def panels(self, at: slice) -> PackedWeight:
        """Return some of the panels, in the same memory."""
        scale = None if self.scale is None else self.scale[at]
        minimum = None if self.minimum is None else self.minimum[at]
        rows = min(PANEL * at.stop, self.shape[0]) - PANEL * at.start
        words = self.words[at]
        return replace(self, words=words, scale=scale, minimum=minimum, shape=(rows, self.shape[1]))

    @property
    def _offset(self) -> int:
        return 0 if self.scale is None or self.minimum is not None else 1 << (self.bits - 1)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int = 16, arena: Arena | Refill | None = None
) -> PackedWeight:
    """Pack a weight [outputs, inputs] for the kernels.

    Args:
        weight: [outputs, inputs] of any float dtype.
        bias: [outputs], or None.
        bits: 32 (float32), 16 (bfloat16), 8 or 4. Quantized weights have one scale for each output and 64 inputs. With
            8 bits they are symmetric around 0. With 4 bits they have a minimum as well, as 16 values are few.
        arena: the memory of the result; None: an arena of its own. A `Refill` replaces an older
            value.
    """
    rows = max(_VALUES_AT_ONCE // max(weight.shape[1], 1) // PANEL, 1) * PANEL
    return pack_parts(torch.split(weight, rows), weight.shape, bias, bits=bits, arena=arena or Arena())


def pack_parts(
    parts: Iterable[torch.Tensor],
    shape: Sequence[int],
    bias: torch.Tensor | None = None,
    *,
    bits: int,
    arena: Arena | Refill,
) -> PackedWeight:
    """Pack a weight as `pack` does, from parts of its rows. The whole weight need not be in memory.

    All parts but the last one have whole panels.
    """
    packed = _empty(shape, bias, bits=bits, arena=arena)
    first = 0
    for part in parts:
        at = slice(first, first - (-len(part) // PANEL))
        first = at.stop
        if bits in FLOAT_DTYPES:
            packed.words[at] = _float_panels(part, FLOAT_DTYPES[bits])
            continue
        dtype = torch.bfloat16 if part.dtype == torch.bfloat16 else torch.float32
        words = _float_panels(part, dtype).contiguous()
        floats = replace(packed, words=words, scale=None, minimum=None, bits=8 * dtype.itemsize)
        _quantize(floats.c(), packed.panels(at), None)
    return packed


def quantize(
    source: CLinear,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    *,
    bits: int,
    arena: Arena | Refill,
    importance: torch.Tensor | None = None,
) -> PackedWeight:
    """Pack a weight that is packed already, with 8 or 4 bits.

    Args:
        source: the packed weight.
        shape: [outputs, inputs] of it, without padding.
        bias: [outputs], or None.
        bits: of the result.
        arena: its memory.
        importance: [inputs] of the square error of each input. The scales of 4 bits then give the smallest sum of them.
            None: the scales follow from the range of the weights.
    """
    packed = _empty(shape, bias, bits=bits, arena=arena)
    if importance is not None:
        importance = functional.pad(importance.float(), (0, -shape[1] % GROUP))
    _quantize(source, packed, importance)
    return packed


def _empty(shape: Sequence[int], bias: torch.Tensor | None, *, bits: int, arena: Arena | Refill) -> PackedWeight:
    """Return the memory of a packed weight."""
    outputs, inputs = shape
    panels, padded = -(-outputs // PANEL), -(-inputs // GROUP) * GROUP
    groups = (panels, padded // GROUP, PANEL)
    return PackedWeight(
        words=arena.zeros((panels, padded * bits // 32, PANEL), torch.int32),
        scale=None if bits in FLOAT_DTYPES else arena.zeros(groups, torch.bfloat16),
        minimum=arena.zeros(groups, torch.bfloat16) if bits == 4 else None,
        bias=None if bias is None else bias.float().contiguous(),
        shape=(outputs, inputs),
        bits=bits,
    )


def _float_panels(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view [outputs / 32, words, 32] int32 of the words of rows [outputs, inputs], which are padded."""
    padding = (0, -rows.shape[1] % GROUP, 0, -len(rows) % PANEL)
    padded = functional.pad(rows, padding) if any(padding) else rows
    return to_panels(padded.to(dtype).contiguous().view(torch.int32))


def _quantize(source: CLinear, packed: PackedWeight, importance: torch.Tensor | None) -> None:
    """Write a weight in panels, of any format, with the bits of `packed`. `importance` is padded."""
    code = load_library().code
    code.outrider_quantize(ctypes.byref(source), ctypes.byref(packed.c()), packed.shape[1], address(importance))


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of two weights [F, H]. Each panel holds 16 rows of `gate`, then the same 16 rows of `up`."""
    halves = [weight.view(-1, _HALF, weight.shape[1]) for weight in (gate, up)]
    return torch.stack(halves, 1).flatten(0, 2)


def separate(interleaved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up weights [F, H] from the result of `interleave`."""
    gate, up = interleaved.view(-1, 2, _HALF, interleaved.shape[1]).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def to_panels(rows: torch.Tensor) -> torch.Tensor:
    """Return a view [outputs / 32, n, 32] of rows [outputs, n]."""
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2)


def unpack(layer: CLinear, shape: tuple[int, int]) -> torch.Tensor:
    """Return the weight [outputs, inputs] of a quantized layer in float32, exactly."""
    weight = torch.empty(shape)
    load_library().code.outrider_unpack(ctypes.byref(layer), *shape, weight.data_ptr())
    return weight
