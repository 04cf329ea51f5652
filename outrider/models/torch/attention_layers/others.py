"""Layers that read inputs of the pass that transformers does not pass to them."""

from functools import cache
from typing import Any

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from outrider.models.torch.attention import CacheReader, MaskRule
from outrider.models.torch.attention_layers.layer import AttentionLayer


class KeywordLayer(AttentionLayer):
    """Nemotron and StableLM, whose decoder layers pass no keyword arguments to their attention."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.original(hidden_states, *args, kv=reader, **kwargs)


class NumberedLayer(AttentionLayer):
    """Zamba, whose attention modules get the number of their layer with each call."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.module.layer_idx = kwargs["layer_idx"]
        return self.original(hidden_states, *args, **kwargs)


class GptNeoLayer(AttentionLayer):
    """GPT-Neo, whose scores have no scale. Every second layer has a window."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        module.layer_idx = module.layer_id
        query, key, value = self.project(hidden_states)
        mask = _window(module.config.window_size) if module.attention_type == "local" else None
        return module.out_proj(self.attend(reader, query, key, value, scale=1.0, mask=mask)), None


@cache
def _window(size: int) -> MaskRule:
    """Return the rule of a window. All layers get the same object, so they share its masks."""
    return MaskRule(sliding_window_causal_mask_function(size), size)


class Llama4Layer(AttentionLayer):
    """Llama 4. Layers without rotary embedding scale each query by its position in the sequence."""

    @staticmethod
    def needed(module: Any) -> bool:
        return bool(module.attn_temperature_tuning and not module.use_rope)

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        query, key, value = self.project(hidden_states)
        steps = ((reader.layout.positions + 1.0) / module.floor_scale).floor()
        query = (query * (steps.log1p() * module.attn_scale + 1.0)[:, None, None]).to(query.dtype)
        mask = kwargs["attention_mask"]
        return module.o_proj(self.attend(reader, query, key, value, scale=module.scaling, mask=mask)), None
