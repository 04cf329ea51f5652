"""The weights of routed experts in the layout of experts.h."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.errors import UnsupportedModel
from outrider.models.native.arena import Arena, Refill
from outrider.models.native.blocks import PackedMatrix, can_pack_together, pack_blocks
from outrider.models.native.pack import PANEL, PackedWeight, interleave, pack, separate
from outrider.models.native.rows import can_pack_rows, pack_rows
from outrider.models.native.structures import CLinear
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.gguf_made import ExpertRows, ExpertWeight
from outrider.models.torch.group_weight import GROUP_KINDS
from outrider.runtime.grouping import instances


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The weights [experts, outputs, inputs] of all experts of a layer, one after another.

    The outputs of each expert are padded to whole panels.
    """

    packed: PackedMatrix
    shape: tuple[int, int, int]  # without padding
    gated: bool  # whether gate and up outputs are interleaved

    @property
    def nbytes(self) -> int:
        """Size in bytes, with padding."""
        return self.packed.nbytes

    def c(self) -> CLinear:
        """Return the structure for the kernels. It holds only addresses, so this object must outlive it."""
        return self.packed.c()

    def unpack(self) -> torch.Tensor:
        """Return the weights [experts, outputs, inputs] of the kernels, in the dtype of `PackedWeight.unpack`."""
        experts, outputs, inputs = self.shape
        weight = self.packed.unpack().view(experts, -1, inputs)[:, :outputs]
        if not self.gated:
            return weight.contiguous()
        return torch.stack([torch.cat(separate(expert)) for expert in weight])


def pack_experts(
    weight: torch.Tensor | ExpertWeight, *, gated: bool, bits: int, arena: Arena | Refill
) -> PackedExperts:
    """Pack the weights of all experts of a layer. Quantized blocks of one type stay as they are.

    Args:
        weight: [experts, outputs, inputs] of any float dtype, or in a file.
        gated: whether the first half of the outputs are gates of the second half. The halves are
            then interleaved.
        bits: bits per weight of those outside blocks, as in `pack`.
        arena: the memory of the result.

    Raises:
        UnsupportedModel: the kernels do not multiply the blocks of a GGUF file.
    """
    experts, outputs, inputs = weight.shape
    rows = None
    if outputs % PANEL == 0:
        rows = (
            ExpertRows(list(weight), torch.arange(experts * outputs).view(experts, outputs))
            if isinstance(weight, torch.Tensor)
            else weight.rows()
        )
    packed = None if rows is None else _pack_rows(rows, gated=gated, bits=bits, arena=arena)
    if packed is None:
        packed = _pack_dense(weight, gated=gated, bits=bits, arena=arena)
    return PackedExperts(packed=packed, shape=(experts, outputs, inputs), gated=gated)


def _pack_rows(rows: ExpertRows, *, gated: bool, bits: int, arena: Arena | Refill) -> PackedMatrix | None:
    """Pack experts without a dense copy; None: the kernels do not multiply them without conversion."""
    order = rows.order[:, :, None]
    if gated:
        order = torch.stack([interleave(*expert.chunk(2)) for expert in order])
    blocks = instances(rows.parts, BlockWeight)
    if len(blocks) == len(rows.parts) and can_pack_together(blocks) and isinstance(arena, Arena):
        return pack_blocks(blocks, order=order.flatten(), arena=arena)
    dense = instances(rows.parts, torch.Tensor)
    if len(dense) == len(rows.parts) and can_pack_rows(dense, bits):
        return pack_rows(dense, None, bits=bits, order=order.flatten(), arena=arena)
    return None


def _pack_dense(weight: torch.Tensor | ExpertWeight, *, gated: bool, bits: int, arena: Arena | Refill) -> PackedWeight:
    """Pack experts from a dense copy. Integers of groups that do not fit together are dequantized."""
    if not isinstance(weight, torch.Tensor):
        if not GROUP_KINDS.issuperset(filter(None, weight.kind.split("+"))):
            raise UnsupportedModel(f"the native kernels do not multiply experts of type {weight.kind}")
        weight = weight.dequantize()
    if gated:
        rows = torch.cat([interleave(*expert.chunk(2)) for expert in weight])
    else:
        rows = functional.pad(weight, (0, 0, 0, -weight.shape[1] % PANEL)).flatten(0, 1)
    return pack(rows, bits=bits, arena=arena)
