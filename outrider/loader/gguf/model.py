"""Make the configuration and the model of transformers that a GGUF file describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from outrider.errors import OutriderError
from outrider.loader.gguf.architectures import architecture_of, settings_of
from outrider.loader.gguf.file import GGUFFile, read_gguf
from outrider.loader.gguf.weights import ROTARY_FACTORS, GGUFWeights
from outrider.models.attention import NAME
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear, BlockWeight

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"F16": torch.float16, "BF16": torch.bfloat16})


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
    return CONFIG_MAPPING[kind](**settings, dtype=stored_dtype(file))


def stored_dtype(file: GGUFFile) -> torch.dtype:
    """Return the type of all matrices of a file; float32 if they have several, or quantized blocks."""
    kinds = file.types
    return _DTYPES.get(kinds[0], torch.float32) if len(kinds) == 1 else torch.float32


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Return the ids of tokens that end a generation."""
    ids = [file.field(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return frozenset(int(each) for each in ids if each is not None)


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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    for prefix, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if weight is not None and prefix != "lm_head":
                _fill(model, prefix, key, _checked(file, weights, f"{prefix}.{key}", weight.shape), dtype)
    _fill_head(model, file, weights, dtype)
    _restore_buffers(model, file)
    return model.eval()


def _checked(file: GGUFFile, weights: GGUFWeights, name: str, shape: torch.Size) -> torch.Tensor | BlockWeight:
    """Return a weight if it has the right shape."""
    if (found := weights.shape(name)) != shape:
        raise OutriderError(
            f"{name} in {file.path} is {tuple(found)} and should be {tuple(shape)}; download or convert it again"
        )
    return weights[name]


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


def _fill_head(model: Any, file: GGUFFile, weights: GGUFWeights, dtype: torch.dtype) -> None:
    """Fill the LM head, which is the embedding if the file has no other."""
    if not model.config.tie_word_embeddings:
        shape = model.lm_head.weight.shape
        _fill(model, "lm_head", "weight", _checked(file, weights, "lm_head.weight", shape), dtype)
        return
    table = model.get_input_embeddings()
    if isinstance(table, BlockEmbedding):
        model.set_submodule("lm_head", BlockLinear(table.blocks, None, table.dtype))
    else:
        model.lm_head.weight = table.weight


def rotary_factors(file: GGUFFile) -> torch.Tensor | None:
    """Return the divisors of the rotary frequencies [D / 2], or None."""
    tensor = file.tensors.get(ROTARY_FACTORS)
    return None if tensor is None else torch.from_numpy(tensor.data.view(np.float32).copy())


def _restore_buffers(model: Any, file: GGUFFile) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors of the file."""
    factors = rotary_factors(file)
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
