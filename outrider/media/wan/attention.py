"""Self-attention of Wan over cached blocks, as a processor of diffusers."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.cache import BlockCache

KeyValue = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Pass:
    """The state that the layers of one pass share."""

    cache: BlockCache
    rotation: KeyValue  # cosines and sines of the block's tokens, each (tokens, 1, half of the channels of a head)
    written: list[KeyValue] = field(default_factory=list)  # keys and values of the block, for each layer so far


class CachedAttention:
    """A processor of `WanAttention`: a block attends to the cached blocks and to itself.

    Args:
        layer: the number of the layer.
        owner: its attribute `current` is the pass that runs.
    """

    def __init__(self, layer: int, owner: Any) -> None:
        self._layer = layer
        self._owner = owner

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: KeyValue | None = None,
    ) -> Tensor:
        """Return the attention's output, (1, tokens, width). `rotary_emb` starts at frame 0, so it is not used."""
        current: Pass = self._owner.current
        queries = _heads(attn.norm_q(attn.to_q(hidden_states)), attn.heads)
        keys = _heads(attn.norm_k(attn.to_k(hidden_states)), attn.heads)
        values = _heads(attn.to_v(hidden_states), attn.heads)
        queries, keys = rotate(queries, current.rotation), rotate(keys, current.rotation)
        # The cache holds (heads, tokens, channels of a head).
        queries, keys, values = (part.transpose(0, 1) for part in (queries, keys, values))
        current.written.append((keys, values))
        past_keys, past_values = current.cache.read(self._layer)
        all_keys, all_values = torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)
        attended = functional.scaled_dot_product_attention(queries[None], all_keys[None], all_values[None])
        joined = attended.transpose(1, 2).flatten(2)
        out: Tensor = attn.to_out[1](attn.to_out[0](joined))
        return out


def rotate(x: Tensor, rotation: KeyValue) -> Tensor:
    """Rotate adjacent pairs of channels of (tokens, heads, channels)."""
    cos, sin = rotation
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.stack([one * cos - two * sin, one * sin + two * cos], dim=-1).flatten(-2).type_as(x)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return (1, tokens, width) as (tokens, heads, channels of a head)."""
    return x[0].view(x.shape[1], heads, -1)
