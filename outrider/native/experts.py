"""Routed experts on the native kernels: their sizes, and their weights in the layout of experts.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from outrider.errors import UnsupportedModel
from outrider.models.gguf_linear import BlockWeight
from outrider.models.gguf_made import ExpertWeight
from outrider.native.abi import CLinear
from outrider.native.blocks import PackedBlocks, can_pack, pack_blocks
from outrider.native.pack import PANEL, Arena, PackedWeight, Refill, interleave, pack, separate
from outrider.native.support import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the layers of a model choose experts."""

    experts: int  # of a layer
    top: int  # experts of a token
    ffn: int  # of an expert
    normalized: bool  # whether the weights of a token's experts add up to 1
    layers: frozenset[int]  # with experts; the others have one MLP

    @classmethod
    def of(cls, config: Any, body: Any) -> Routing | None:
        """Read the sizes of experts from a text configuration and the module with the decoder layers.

        Returns:
            The sizes; None if no layer has experts.

        Raises:
            UnsupportedModel: the kernels do not support these experts.
        """
        if not FAMILIES[config.model_type].routed:
            return None
        if getattr(config, "clip_qkv", None) is not None:
            raise UnsupportedModel(f"{config.model_type}: the native kernels do not support clip_qkv")
        blocks = {i: layer.mlp for i, layer in enumerate(body.layers) if hasattr(layer.mlp, "experts")}
        if not blocks:
            return None
        block = next(iter(blocks.values()))
        experts, _, ffn = block.experts.down_proj.shape
        if block.gate.top_k > experts:
            raise UnsupportedModel(
                f"{config.model_type}: num_experts_per_tok is {block.gate.top_k}, but a layer has {experts} experts"
            )
        return cls(
            experts=experts,
            top=block.gate.top_k,
            ffn=ffn,
            normalized=config.model_type == "mixtral" or bool(config.norm_topk_prob),
            layers=frozenset(blocks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The weights [experts, outputs, inputs] of all experts of a layer, one after another.

    The outputs of each expert are padded to whole panels.
    """

    packed: PackedWeight | PackedBlocks
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


def pack_experts(weight: torch.Tensor, *, gated: bool, bits: int, arena: Arena | Refill) -> PackedExperts:
    """Pack the weights of all experts of a layer.

    Args:
        weight: [experts, outputs, inputs] of any float dtype.
        gated: whether the first half of the outputs are gates of the second half. The halves are then interleaved.
        bits: bits per weight, as in `pack`.
        arena: the memory of the result.
    """
    experts, outputs, inputs = weight.shape
    if gated:
        rows = torch.cat([interleave(*expert.chunk(2)) for expert in weight])
    else:
        rows = functional.pad(weight, (0, 0, 0, -outputs % PANEL)).flatten(0, 1)
    return PackedExperts(packed=pack(rows, bits=bits, arena=arena), shape=(experts, outputs, inputs), gated=gated)


def pack_expert_blocks(weight: ExpertWeight, *, gated: bool, arena: Arena) -> PackedExperts:
    """Pack the weights of all experts of a layer, which stay in GGUF blocks. The arguments are those of `pack_experts`.

    Raises:
        UnsupportedModel: the kernels do not multiply these blocks.
    """
    experts, outputs, inputs = weight.shape
    blocks = [part for part in weight.parts if isinstance(part, BlockWeight)]
    kinds = {block.kind for block in blocks}
    aligned = outputs % PANEL == 0
    if not (weight.stacked and aligned and len(blocks) == len(weight.parts) and kinds and can_pack(weight.kind)):
        raise UnsupportedModel(f"the native kernels do not multiply experts of type {weight.kind}")
    rows = []
    first = 0
    for block in blocks:
        rows.append(torch.arange(first, first + len(block.data)).view(experts, -1))
        first += len(block.data)
    order = torch.cat(rows, 1)[:, :, None]
    if gated:
        order = torch.stack([interleave(*expert.chunk(2)) for expert in order])
    packed = pack_blocks(blocks, order=order.flatten(), arena=arena)
    return PackedExperts(packed=packed, shape=(experts, outputs, inputs), gated=gated)
