"""The linear layers of a decoder that are packed together: which ones, with how many bits, and in which memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from outrider.models.native.arena import Arena, Refill
from outrider.models.native.blocks import PackedMatrix, can_pack_together, half_blocks, pack_blocks
from outrider.models.native.dimensions import Dimensions
from outrider.models.native.experts import PackedExperts, pack_experts
from outrider.models.native.pack import PackedWeight, interleave, pack, separate
from outrider.models.native.rows import can_pack_rows, pack_rows
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.gguf_made import ExpertWeight
from outrider.models.torch.weights import Weight, Weights
from outrider.runtime.grouping import instances

HEAD = "lm_head"
MIN_SENSITIVE_BITS = 8  # of weights of which 4 bits would change the output too much, such as the LM head
_OUT, _DOWN = "self_attn.o_proj", "mlp.down_proj"
# The parts of a layer with experts, by the name of the packed weight.
_EXPERTS = {"router": ("mlp.gate",), "gate_up": ("mlp.experts.gate_up_proj",), "down": ("mlp.experts.down_proj",)}
_log = logging.getLogger("outrider")


def joined_layers(weights: Weights, shape: Dimensions) -> dict[str, tuple[str, ...]]:
    """Return the linear layers that are packed together, by the name of the packed weight.

    Values have a packed weight of their own in layers where their blocks are of another type than those of queries and
    keys.
    """
    joined: dict[str, tuple[str, ...]] = {HEAD: (HEAD,)}
    family = shape.family
    dense = {"qkv": family.attention, "out": (_OUT,), "gate_up": family.mlp, "down": (_DOWN,)}
    for i in range(shape.layers):
        has_experts = shape.routing is not None and i in shape.routing.layers
        for name, parts in (dense | _EXPERTS if has_experts else dense).items():
            joined[f"{i}.{name}"] = tuple(f"{weights.body}.layers.{i}.{part}" for part in parts)
        if len(family.attention) > 1:
            query, key, value = joined[f"{i}.qkv"]
            if _types_differ(weights, key, value):
                joined[f"{i}.qkv"] = query, key
                joined[f"{i}.value"] = (value,)
    return joined


def _types_differ(weights: Weights, first: str, second: str) -> bool:
    """Return whether two linear layers have blocks of different types."""
    a, b = weights[f"{first}.weight"], weights[f"{second}.weight"]
    return isinstance(a, BlockWeight) and isinstance(b, BlockWeight) and a.kind != b.kind


def weight_name(part: str) -> str:
    """Return the name of the weight of a linear layer, or of the weights of all experts."""
    return part if ".experts." in part else f"{part}.weight"


def bits_of(name: str, bits: int) -> int:
    """Return the bits of a packed weight in a decoder whose linear layers have so many."""
    if name.endswith("router"):
        return 32  # with rounded weights, tokens would choose other experts
    return max(bits, MIN_SENSITIVE_BITS) if name == HEAD else bits


def memory_of(old: PackedMatrix | PackedExperts | None, arena: Arena) -> Arena | Refill:
    """Return the memory for a new value of a packed weight: that of the old one if there is one, else the arena."""
    packed = old.packed if isinstance(old, PackedExperts) else old
    return Refill(packed) if isinstance(packed, PackedWeight) else arena


def pack_joined(
    name: str,
    parts: Sequence[str],
    weights: Mapping[str, Weight],
    *,
    bits: int,
    arena: Arena,
    old: PackedMatrix | PackedExperts | None = None,
) -> PackedMatrix | PackedExperts:
    """Pack linear layers together. GGUF blocks of one type stay as they are.

    Args:
        name: of the packed weight.
        parts: the names of the linear layers, as `joined_layers` returns them.
        weights: their weights and biases, by their names in transformers.
        bits: of the linear layers of the decoder.
        arena: the memory of the result, unless `old` has it.
        old: a value of the same name that is overwritten.
    """
    values = [weights[weight_name(part)] for part in parts]
    memory = memory_of(old, arena)
    gated = name.endswith("gate_up")
    if ".experts." in parts[0]:
        experts = values[0]
        assert isinstance(experts, torch.Tensor | ExpertWeight)
        return pack_experts(experts, gated=gated, bits=bits, arena=memory)
    biases = [bias for part in parts if isinstance(bias := weights.get(f"{part}.bias"), torch.Tensor)]
    bias = torch.cat(biases) if biases else None
    order = _interleaved_rows(sum(value.shape[0] for value in values) // 2) if gated else None
    blocks = instances(values, BlockWeight)
    if len(blocks) == len(values) and can_pack_together(blocks):
        return pack_blocks(blocks, bias, order=order, arena=arena)
    if blocks:
        types = ", ".join(sorted({block.kind for block in blocks}))
        _log.info("%s: weights of type %s are converted to %d bits", name, types, bits)
    dense = list(map(dense_weight, values))
    if bits == 32 and all(value.dtype == torch.float16 for value in dense) and not name.endswith("router"):
        return pack_blocks(list(map(half_blocks, dense)), bias, order=order, arena=arena)
    own_bits = bits_of(name, bits)
    if can_pack_rows(dense, own_bits):
        return pack_rows(dense, bias, bits=own_bits, order=order, arena=memory)
    matrix = torch.cat(dense)
    if gated:
        matrix = interleave(*matrix.chunk(2))
    return pack(matrix, bias, bits=own_bits, arena=memory)


def unpack_joined(
    name: str, parts: Sequence[str], packed: PackedMatrix | PackedExperts, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return the weights and biases of linear layers that `pack_joined` has packed. `shapes` are those of weights."""
    if isinstance(packed, PackedExperts):
        return {parts[0]: packed.unpack()}
    sizes = [shapes[f"{part}.weight"][0] for part in parts]
    matrix = packed.unpack()
    if name.endswith("gate_up"):
        matrix = torch.cat(separate(matrix))
    weights = {f"{part}.weight": value for part, value in zip(parts, torch.split(matrix, sizes), strict=True)}
    if packed.bias is not None:
        for part, bias in zip(parts, torch.split(packed.bias, sizes), strict=True):
            weights[f"{part}.bias"] = bias
    return weights


def dense_weight(weight: Weight) -> torch.Tensor:
    """Return a weight as a tensor; blocks are dequantized."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _interleaved_rows(size: int) -> torch.Tensor:
    """Return the order of rows in which `interleave` puts two matrices of `size` rows, one above the other."""
    numbers = torch.arange(2 * size)[:, None]
    return interleave(numbers[:size], numbers[size:]).flatten()
