"""Make a model of transformers whose weights stay in mapped files, in the type or blocks of the file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from outrider.models.attention import NAME, attend, receive_mask_rule
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear, BlockWeight, DenseWeight
from outrider.models.weights import Weights

_HEAD = "lm_head"


def fill_model(
    config: Any, weights: Weights, dtype: torch.dtype, *, factors: list[float] | None = None, widen: bool = False
) -> Any:
    """Make a model. Quantized matrices stay in their blocks.

    Args:
        config: the configuration of transformers.
        weights: the weights.
        dtype: the type in which the model computes, and of all weights that are not in quantized blocks.
        factors: divisors of the rotary frequencies [R / 2]; None: there are none.
        widen: whether dense matrices keep their type, too. Parts of them are converted to `dtype` when they are used,
            so the model takes little memory.

    Raises:
        OutriderError: a weight is missing, or has the wrong shape.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, receive_mask_rule)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    head = f"{_HEAD}.weight" if config.tie_word_embeddings else None
    weights.check({name: weight.shape for name, weight in model.state_dict().items() if name != head})
    filler = _Filler(model, weights, dtype, widen=widen)
    for prefix, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is not None and prefix != _HEAD:
                filler.fill(prefix, key)
    if config.tie_word_embeddings:
        filler.tie_head()
    else:
        for key in [key for key, weight in model.lm_head._parameters.items() if weight is not None]:
            filler.fill(_HEAD, key)
    _restore_buffers(model, factors)
    return model.eval()


class _Filler:
    """Replaces the parameters of a model on the meta device."""

    def __init__(self, model: Any, weights: Weights, dtype: torch.dtype, *, widen: bool) -> None:
        self._model = model
        self._weights = weights
        self._dtype = dtype
        self._widen = widen

    def fill(self, prefix: str, key: str) -> None:
        """Set the parameter `key` of the module `prefix`."""
        module = self._model.get_submodule(prefix)
        name = f"{prefix}.{key}"
        value: torch.Tensor | BlockWeight | DenseWeight = self._weights[name]
        is_matrix = isinstance(module, nn.Linear) or type(module) is nn.Embedding
        if self._widen and isinstance(value, torch.Tensor) and is_matrix and key == "weight":
            value = DenseWeight(value, release=lambda: self._weights.release(name))
        if isinstance(value, torch.Tensor):
            setattr(module, key, nn.Parameter(value.to(self._dtype), requires_grad=False))
        elif isinstance(module, nn.Linear):
            linear = BlockLinear(value, None, self._dtype)
            linear._parameters["bias"] = module.bias
            self._model.set_submodule(prefix, linear)
        elif type(module) is nn.Embedding:
            self._model.set_submodule(prefix, BlockEmbedding(value, self._dtype))
        else:
            setattr(module, key, nn.Parameter(value.dequantize().to(self._dtype), requires_grad=False))

    def tie_head(self) -> None:
        """Let the LM head use the embedding."""
        table = self._model.get_input_embeddings()
        if isinstance(table, BlockEmbedding):
            self._model.set_submodule(_HEAD, BlockLinear(table.blocks, None, table.dtype))
        else:
            self._model.lm_head.weight = table.weight


def _restore_buffers(model: Any, factors: list[float] | None) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            continue
        if hasattr(module, "scalar_embed_scale"):  # the scaled embedding of Gemma
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
            continue
        rotary = type(module)(config=model.config)
        if factors is not None:
            rotary.inv_freq /= torch.tensor(factors)
        model.set_submodule(name, rotary)
