"""Make a model of transformers from its configuration and a mapping of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.errors import OutriderError
from outrider.models.attention import NAME
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear, BlockWeight

Weight = torch.Tensor | BlockWeight


class Weights(Protocol):
    """Weights by their names in the `state_dict` of transformers. A value is made when it is accessed."""

    @property
    def path(self) -> Path:
        """The file or folder that they are in."""

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight, or raise `OutriderError` if there is none."""

    def __getitem__(self, name: str) -> Weight: ...


def fill_model(config: Any, weights: Weights, dtype: torch.dtype, *, factors: torch.Tensor | None = None) -> Any:
    """Make a decoder-only model. Quantized matrices stay in their blocks.

    Args:
        config: its configuration.
        weights: its weights.
        dtype: the type of all weights that are not in quantized blocks.
        factors: divisors of the rotary frequencies [D / 2], or None.

    Raises:
        OutriderError: a weight is missing, or has the wrong shape.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    for prefix, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is not None and prefix != "lm_head":
                _fill(model, prefix, key, _checked(weights, f"{prefix}.{key}", weight.shape), dtype)
    _fill_head(model, weights, dtype)
    _restore_buffers(model, factors)
    return model.eval()


def _checked(weights: Weights, name: str, shape: torch.Size) -> Weight:
    """Return a weight if it has the right shape."""
    if (found := weights.shape(name)) != shape:
        raise OutriderError(
            f"{name} in {weights.path} is {tuple(found)} and should be {tuple(shape)}; download or convert it again"
        )
    return weights[name]


def _fill(model: nn.Module, prefix: str, key: str, value: Weight, dtype: torch.dtype) -> None:
    module = model.get_submodule(prefix)
    if isinstance(value, torch.Tensor):
        setattr(module, key, nn.Parameter(value.to(dtype), requires_grad=False))
        return
    if isinstance(module, nn.Linear):
        replacement: nn.Module = BlockLinear(value, None, dtype)
        replacement._parameters["bias"] = module.bias
    elif type(module) is nn.Embedding:
        replacement = BlockEmbedding(value, dtype)
    else:
        setattr(module, key, nn.Parameter(value.dequantize().to(dtype), requires_grad=False))
        return
    model.set_submodule(prefix, replacement)


def _fill_head(model: Any, weights: Weights, dtype: torch.dtype) -> None:
    """Fill the LM head, which is the embedding if the checkpoint has no other."""
    if not model.config.tie_word_embeddings:
        for key, weight in list(model.lm_head._parameters.items()):
            if weight is not None:
                _fill(model, "lm_head", key, _checked(weights, f"lm_head.{key}", weight.shape), dtype)
        return
    table = model.get_input_embeddings()
    if isinstance(table, BlockEmbedding):
        model.set_submodule("lm_head", BlockLinear(table.blocks, None, table.dtype))
    else:
        model.lm_head.weight = table.weight


def _restore_buffers(model: Any, factors: torch.Tensor | None) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            continue
        if hasattr(module, "scalar_embed_scale"):  # the scaled embedding of Gemma
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
            continue
        rotary = type(module)(config=model.config)
        if factors is not None:
            rotary.inv_freq /= factors.view(rotary.inv_freq.shape)
        model.set_submodule(name, rotary)
