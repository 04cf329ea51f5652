"""Routed experts on the native kernels: their sizes, and their weights in the layout of experts.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from outrider.errors import UnsupportedModel
from outrider.models.native.abi import CLinear
from outrider.models.native.blocks import PackedBlocks, can_pack, pack_blocks
from outrider.models.native.pack import PANEL, Arena, PackedWeight, Refill, interleave, pack, separate
from outrider.models.native.support import FAMILIES
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.gguf_made import ExpertWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the layers of a model choose experts."""

    experts: int  # of a layer
    top: int  # experts of a token
    ffn: int  # of an expert
    normalized: bool  # whether the weights of a token's experts add up to 1
    layers: frozenset[int]  # with experts; the others have one MLP

    @classmethod
    def of(cls, config: Any) -> Routing | None:
        """Read the sizes of experts from a text configuration.

        Returns:
            The sizes; None if no layer has experts.

        Raises:
            UnsupportedModel: the kernels do not support these experts.
        """
        if not FAMILIES[config.model_type].routed:
            return None
        if getattr(config, "clip_qkv", None) is not None:
            raise UnsupportedModel(f"{config.model_type}: the native kernels do not support clip_qkv")
        layers = _routed_layers(config)
        if not layers:
            return None
        experts = config.num_local_experts if config.model_type == "mixtral" else config.num_experts
        top = config.num_experts_per_tok
        if top > experts:
            raise UnsupportedModel(
                f"{config.model_type}: num_experts_per_tok is {top}, but a layer has {experts} experts"
            )
        return cls(
            experts=experts,
            top=top,
            ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            normalized=bool(getattr(config, "norm_topk_prob", True)),
            layers=layers,
        )


def _routed_layers(config: Any) -> frozenset[int]:
    """Return the layers with experts. Qwen3 names layers without, and the distance of layers with experts."""
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    layers = range(config.num_hidden_layers)
    return frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)


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
