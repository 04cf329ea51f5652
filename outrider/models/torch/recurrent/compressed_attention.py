"""The projection of compressed convolutional attention: ZAYA.

Queries and keys go through two causal convolutions, and one half of each value is that of the token
before. So the inputs of the last tokens are a state, although an attention layer reads the results.
"""

from collections.abc import Mapping
from typing import Any

import torch

from outrider.models.torch.recurrent import convolution
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, split_heads
from outrider.models.torch.recurrent.rows import Rows


class CompressedProjection(RecurrentLayer):
    """The state holds what the convolutions read, and beside it the delayed half of the values."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        query, key = module.q_proj(hidden), module.k_proj(hidden)
        return {
            "query": query,
            "key": key,
            "value": module.v_proj_current(hidden),
            "window": torch.cat([query, key, module.v_proj_delayed(hidden)], -1),
        }

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        window = inputs["window"]
        state = convolution.fresh(window, self.module.conv_kernel_size + 1)
        if (bias := self.module.v_proj_delayed.bias) is not None:  # the delayed value of no token
            state[convolution.NAME][..., -len(bias) :] = bias
        return state

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(inputs["window"])

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        """Return the convolved queries and keys, and the delayed values, [B, L, C]."""
        module = self.module
        windows = convolution.windows(staged, inputs["window"], rows, module.conv_kernel_size + 1)  # [B, L, K, C]
        channels = module.conv_qk_depthwise.in_channels
        batch, length, size, _ = windows.shape
        mixed = windows[..., :channels].reshape(batch * length, size, channels).transpose(1, 2)
        mixed = module.conv_qk_grouped(module.conv_qk_depthwise(mixed))  # [B * L, channels, 1]
        return torch.cat([mixed.view(batch, length, channels), windows[:, :, -2, channels:]], -1)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return queries, keys and values side by side, [T, C]."""
        module = self.module
        sharing = module.num_key_value_groups
        query = split_heads(inputs["query"], module.num_attention_heads)
        key = split_heads(inputs["key"], module.num_key_value_heads)
        query_residual = (query + key.repeat_interleave(sharing, 1)) * 0.5
        key_residual = query_residual.view(len(query), -1, sharing, module.head_dim).mean(2)
        residual = torch.cat([query_residual.flatten(1), key_residual.flatten(1)], -1)
        width = residual.shape[-1]
        return torch.cat([mixed[:, :width] + residual, inputs["value"], mixed[:, width:]], -1)

    def wrap(self, output: torch.Tensor) -> Any:
        """Return queries [1, T, Hq, D], keys [1, T, Hkv, D] and values [1, T, Hkv, D]."""
        module = self.module
        sizes = [module.num_attention_heads, module.num_key_value_heads, module.num_key_value_heads]
        return torch.split(split_heads(output, sum(sizes)), sizes, 2)
