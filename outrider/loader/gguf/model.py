"""Make the configuration and the model of transformers that a GGUF file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from outrider.loader.gguf.architectures import architecture_of, settings_of
from outrider.loader.gguf.file import GGUFFile, read_gguf
from outrider.loader.gguf.weights import GGUFWeights
from outrider.models.attention import NAME, attend, receive_mask_rule
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear, BlockWeight


def read_config(path: Path) -> Any:
    """Return the configuration of transformers of a file. It names the type in which the file is stored.

    Raises:
        OutriderError: the file is missing or damaged.
        UnsupportedModel: the architecture, its rotary scaling, or a type of tensors is not supported.
    """
    return make_config(read_gguf(path))


def make_config(file: GGUFFile) -> Any:
    """Return the configuration of transformers of an open file. Errors are those of `read_config`."""
    settings = settings_of(file)
    kind = architecture_of(file).model_type
    return CONFIG_MAPPING[kind](**settings, dtype=file.stored_dtype())


def load_model(file: GGUFFile, config: Any, weights: GGUFWeights, dtype: torch.dtype) -> Any:
    """Make the model. Quantized matrices stay in their blocks.

    Args:
        file: the file.
        config: its configuration.
        weights: its weights.
        dtype: the type of all weights that are not in quantized blocks.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, receive_mask_rule)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    weights.check({name: weight.shape for name, weight in model.state_dict().items()})
    for prefix, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is not None and prefix != "lm_head":
                _fill(model, prefix, key, weights[f"{prefix}.{key}"], dtype)
    _fill_head(model, weights, dtype)
    _restore_buffers(model, file)
    return model.eval()


def _fill(model: nn.Module, prefix: str, key: str, value: torch.Tensor | BlockWeight, dtype: torch.dtype) -> None:
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


def _fill_head(model: Any, weights: GGUFWeights, dtype: torch.dtype) -> None:
    """Fill the LM head, which is the embedding if the file has no other."""
    if not model.config.tie_word_embeddings:
        _fill(model, "lm_head", "weight", weights["lm_head.weight"], dtype)
        return
    table = model.get_input_embeddings()
    if isinstance(table, BlockEmbedding):
        model.set_submodule("lm_head", BlockLinear(table.blocks, None, table.dtype))
    else:
        model.lm_head.weight = table.weight


def _restore_buffers(model: Any, file: GGUFFile) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors of the file."""
    factors = file.rotary_factors()
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
