"""Doge, whose attention adds to each score a number that is computed from the value."""

from typing import Any

import torch
from torch.nn import functional

from outrider.models.torch.attention import CacheReader
from outrider.models.torch.attention_layers.layer import AttentionLayer
from outrider.models.torch.rotary import rotate

_PARTS = 8  # elements that a key gets for its bias; kernels prefer multiples of 8


class DogeLayer(AttentionLayer):
    """Doge.

    It would also hide all but `keep_window_size` keys. The context is not longer than that.
    """

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        query, key, value = self.project(hidden_states)
        angles = args[0] if args else kwargs["position_embeddings"]
        cosine, sine = (each[:, :, None] for each in angles)  # [1, T, 1, D]
        query, key = rotate(module.q_norm(query), cosine, sine), rotate(module.k_norm(key), cosine, sine)
        bias = (module.A * functional.softplus(module.dt_proj(value.flatten(2)))).exp().float()
        query, key = _append_bias(query, key, bias / module.scaling)
        mask = kwargs["attention_mask"]
        return module.o_proj(self.attend(reader, query, key, value, scale=module.scaling, mask=mask)), None


def _append_bias(
    query: torch.Tensor,  # [1, T, Hq, D]
    key: torch.Tensor,  # [1, T, Hkv, D]
    bias: torch.Tensor,  # [1, T, Hkv] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append elements to the queries and keys that add the bias of a key to its product with any query.

    So the bias is cached with the key, and moves with it. A key in bfloat16 or float16 gets the
    bias as a sum of numbers of that dtype, which has the precision of float32.
    """
    parts = []
    limit = torch.finfo(key.dtype).max
    for _ in range(_PARTS):
        part = bias.clamp(-limit, limit).to(key.dtype)
        parts.append(part)
        bias = bias - part.float()
    ones = query.new_ones(*query.shape[:-1], _PARTS)
    return torch.cat([query, ones], -1), torch.cat([key, torch.stack(parts, -1)], -1)
