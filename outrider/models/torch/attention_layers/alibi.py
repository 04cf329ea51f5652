"""Layers with attention with linear biases (ALiBi, Press et al. 2022): BLOOM, MPT and some Falcon models.

A score gets a bias: the distance from the query to the key, times a slope that depends on the head.
Adding the same number to all scores of a query does not change the attention weights. So the
position of the key may replace the distance.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from outrider.models.torch.attention import CacheReader
from outrider.models.torch.attention_layers.layer import AttentionLayer
from outrider.models.torch.rotary import rotate


class BloomLayer(AttentionLayer):
    """BLOOM. The residual is added in the attention module."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        residual = args[0] if args else kwargs["residual"]
        module = self.module
        fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim))
        query, key, value = fused.unbind(-2)
        bias = _BloomBias(bloom_slopes(module.num_heads), hidden_states.dtype)
        out = self.attend(reader, query, key, value, scale=module.inv_norm_factor, bias=bias)
        return module.dense(out) + residual, None


class MptLayer(AttentionLayer):
    """MPT."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = fused.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(-3)
        bias = _MptBias(mpt_slopes(module.n_heads))
        return module.out_proj(self.attend(reader, query, key, value, scale=module.softmax_scale, bias=bias)), None


class FalconLayer(AttentionLayer):
    """Falcon, with ALiBi or rotary embedding."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        query, key, value = module._split_heads(module.query_key_value(hidden_states))
        if module.new_decoder_architecture:  # it has repeated the keys for all query heads
            sharing = module.num_heads // module.num_kv_heads
            key, value = key[:, :, ::sharing], value[:, :, ::sharing]
        scale = module.head_dim**-0.5
        bias = None
        if module.config.alibi:
            bias = _FalconBias(bloom_slopes(module.num_heads), hidden_states.dtype, scale)
        else:
            cosine, sine = (each[:, :, None] for each in kwargs["position_embeddings"])  # [1, T, 1, D]
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        return module.dense(self.attend(reader, query, key, value, scale=scale, bias=bias)), None


# The classes below are a `PositionBias` each. They round where transformers rounds.


@dataclass(frozen=True, slots=True)
class _BloomBias:
    slopes: tuple[float, ...]  # by head
    dtype: torch.dtype  # of the model

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        return _times(self.slopes, key_positions[:, None]).to(self.dtype)


@dataclass(frozen=True, slots=True)
class _FalconBias:
    slopes: tuple[float, ...]
    dtype: torch.dtype
    scale: float  # of the scores, which includes the bias

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        bias = _times(self.slopes, key_positions[:, None], torch.bfloat16)
        return bias.to(self.dtype) * self.scale


@dataclass(frozen=True, slots=True)
class _MptBias:
    """transformers adds it in float32. Here it is rounded to the dtype of the model, and is exact for close keys."""

    slopes: tuple[float, ...]

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        return _times(self.slopes, key_positions[:, None] - query_positions[..., None])


def _times(slopes: tuple[float, ...], positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return slopes times positions [R, L, S] as [R, H, L, S]."""
    heads = torch.tensor(slopes, dtype=dtype, device=positions.device)
    return positions.to(dtype)[:, None] * heads[:, None, None]


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of BLOOM and Falcon: those of a power of two, and then every second one of the next."""
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * (i + 1) / power for i in range(power)]
    exponents += [4 * (2 * i + 1) / power for i in range(heads - power)]
    return tuple(2**-exponent for exponent in exponents)


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of MPT: every second one of the next power of two, and then the others."""
    power: int = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(slopes)
