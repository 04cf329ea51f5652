"""Read packed weights a few panels at a time: as a matrix, or to pack them with other bits."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from outrider.models.native.arena import Arena, Refill
from outrider.models.native.blocks import PackedMatrix
from outrider.models.native.pack import FLOAT_DTYPES, PANEL, PackedWeight, pack_parts, quantize

_VALUES_AT_ONCE = 1 << 20  # of a weight that is unpacked: 4 MiB of float32
_WHOLE = frozenset({"bias", "order"})  # parts of a packed weight that do not belong to its panels


def unpacked_parts(packed: PackedMatrix) -> Iterator[torch.Tensor]:
    """Yield the rows of a packed weight, in order. Each part has whole panels."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    panels = max(_VALUES_AT_ONCE // (PANEL * packed.shape[1]), 1)
    for first in range(0, len(packed.words), panels):
        part: dict[str, Any] = {name: tensors[name][first : first + panels] for name in tensors.keys() - _WHOLE}
        rows = min(panels * PANEL, packed.shape[0] - first * PANEL)
        yield replace(packed, shape=(rows, packed.shape[1]), **part).unpack()


def unpacked_matrix(packed: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return a packed weight as a matrix [outputs, inputs]."""
    matrix = torch.empty(packed.shape, dtype=dtype)
    first = 0
    for part in unpacked_parts(packed):
        matrix[first : first + len(part)] = part
        first += len(part)
    return matrix


def repack(
    packed: PackedMatrix, bits: int, arena: Arena | Refill, importance: torch.Tensor | None = None
) -> PackedWeight:
    """Return a packed weight with other bits. `importance` [inputs] is that of `quantize`."""
    if bits in FLOAT_DTYPES:
        return pack_parts(unpacked_parts(packed), packed.shape, packed.bias, bits=bits, arena=arena)
    return quantize(packed.c(), packed.shape, packed.bias, bits=bits, arena=arena, importance=importance)
