"""Describe a decoder to the kernels: the structures of its layers and of the whole model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from outrider.models.native.pack import PackedWeight
from outrider.models.native.structures import CLayer, CLinear, CModel, address

if TYPE_CHECKING:
    from outrider.models.native.weights import DecoderWeights


def layer_structures(weights: DecoderWeights, layers: Sequence[int]) -> ctypes.Array[CLayer]:
    """Return the structures of the layers that run. They hold addresses of the weights, which must outlive them."""
    return (CLayer * len(layers))(*(_layer_structure(weights, layer) for layer in layers))


def _layer_structure(weights: DecoderWeights, i: int) -> CLayer:
    family = weights.shape.family
    routing = weights.shape.routing

    def linear(name: str) -> CLinear:
        packed = weights.packed.get(f"{i}.{name}")
        return packed.c() if packed else CLinear()

    def norm(name: str | None) -> int:
        return address(weights.norm(i, name))

    return CLayer(
        qkv=linear("qkv"),
        out=linear("out"),
        gate_up=linear("gate_up"),
        down=linear("down"),
        value=linear("value"),
        router=linear("router"),
        attention_norm=norm(family.attention_norm),
        mlp_norm=norm(family.mlp_norm),
        attention_post_norm=norm(family.attention_post_norm),
        mlp_post_norm=norm(family.mlp_post_norm),
        query_norm=norm("self_attn.q_norm"),
        key_norm=norm("self_attn.k_norm"),
        window=weights.shape.windows[i],
        wide_norms=family.wide_norms,
        rotary=weights.shape.rotary.table[i],
        top=routing.top if routing else 0,
        normalized=routing.normalized if routing else 0,
    )


def model_structure(weights: DecoderWeights, layers: ctypes.Array[CLayer], **fields: Any) -> CModel:
    """Return the structure of a model.

    Args:
        weights: its weights.
        layers: the structures of the layers that run.
        fields: those that do not follow from the weights: the KV cache, and what limits the LM head.
    """
    shape = weights.shape
    rounds_table = isinstance(weights.table, PackedWeight)
    table_dtype = weights.dtype if rounds_table else torch.float32
    return CModel(
        layer=ctypes.addressof(layers),
        embedding=address(weights.embedding),
        norm=address(weights.final_norm),
        frequency=address(shape.rotary.frequency),
        rotary_scale=address(shape.rotary.scale),
        head=weights.head.c(),
        table=weights.table.c() if weights.table else CLinear(),
        bits=8 * weights.dtype.itemsize,
        layers=len(layers),
        hidden=shape.hidden,
        heads=shape.heads,
        key_heads=shape.key_heads,
        dim=shape.dim,
        ffn=shape.ffn,
        threads=torch.get_num_threads(),
        rotaries=len(shape.rotary.frequency),
        rotary_dim=shape.rotary.dim,
        gelu=shape.gelu,
        epsilon=shape.epsilon,
        scale=shape.scale,
        rounds_table=rounds_table,
        table_scale=float(torch.tensor(shape.table_scale, dtype=table_dtype)),
        embedding_scale=shape.embedding_scale,
        residual_scale=shape.residual_scale,
        logit_divisor=shape.logit_divisor,
        score_cap=shape.score_cap,
        logit_cap=shape.logit_cap,
        **fields,
    )
