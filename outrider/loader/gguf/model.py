"""Make the configuration and the model of transformers that a GGUF file describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from outrider.errors import OutriderError
from outrider.loader.gguf.architectures import settings_of
from outrider.loader.gguf.file import GGUFFile, read_gguf
from outrider.loader.gguf.weights import ROTARY_FACTORS, GGUFWeights, Weight
from outrider.models.gguf_linear import BlockEmbedding, BlockLinear
from outrider.models.gguf_made import BlockExperts, DenseInputExperts, ExpertWeight
from outrider.native.support import FAMILIES

_log = logging.getLogger("outrider")
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
    kind = settings.pop("model_type")
    return CONFIG_MAPPING[kind](**settings, dtype=stored_dtype(file))


def stored_dtype(file: GGUFFile) -> torch.dtype:
    """Return the type of the matrices of a file but a few in float32, such as routers; float32 for quantized blocks."""
    kinds = set(file.types) - {"F32"}
    return _DTYPES.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Return the ids of tokens that end a generation."""
    ids = [file.field(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return frozenset(int(each) for each in ids if each is not None)


def load_model(
    file: GGUFFile, config: Any, weights: GGUFWeights, dtype: torch.dtype, attention: Mapping[str, str]
) -> Any:
    """Make the model. Quantized matrices stay in their blocks.

    Args:
        file: the file.
        config: its configuration.
        weights: its weights.
        dtype: the type of all weights that are not in quantized blocks.
        attention: the arguments that choose the attention of the model.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
        UnsupportedModel: the model does not use a tensor.
    """
    if file.quantized:  # other functions read all experts at once
        attention = {**attention, "experts_implementation": "eager"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    _restore_buffers(model, file)
    head = model.get_output_embeddings()
    persistent = model.state_dict().keys()
    weights.check_used(persistent)
    for prefix, module in list(model.named_modules()):
        for key, weight in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{prefix}.{key}"
            if weight is not None and module is not head and name in persistent:
                _fill(model, prefix, key, _checked(file, weights, name, weight.shape), dtype)
    _fill_head(model, file, weights, dtype)
    return model.eval()


def _checked(file: GGUFFile, weights: GGUFWeights, name: str, shape: torch.Size) -> Weight:
    """Return a weight if it has the right shape."""
    if (found := weights.shape(name)) != shape:
        raise OutriderError(
            f"{name} in {file.path} is {tuple(found)} and should be {tuple(shape)}; download or convert it again"
        )
    return weights[name]


def _fill(model: Any, prefix: str, key: str, value: Weight, dtype: torch.dtype) -> None:
    module = model.get_submodule(prefix)
    if isinstance(value, ExpertWeight):
        del module._parameters[key]
        module.add_module(key, BlockExperts(value, dtype))
        if type(module).__name__ == "Llama4TextExperts" and key == "down_proj":
            model.set_submodule(prefix, DenseInputExperts(module))
        return
    if not isinstance(value, torch.Tensor):
        scale = getattr(module, "scalar_embed_scale", 1.0)
        on_torch = model.config.model_type not in FAMILIES
        if isinstance(module, nn.Linear):
            replacement: nn.Module = BlockLinear(value, None, dtype)
            replacement._parameters["bias"] = module.bias
            model.set_submodule(prefix, replacement)
            return
        if type(module) is nn.Embedding or (scale != 1.0 and on_torch):
            model.set_submodule(prefix, BlockEmbedding(value, dtype, scale=scale))
            return
        _log.info("%s.%s: weights of type %s are expanded to %s", prefix, key, value.kind, dtype)
        value = value.dequantize()
    if (buffer := module._buffers.get(key)) is not None:
        module._buffers[key] = value.to(dtype).view(buffer.shape)
    else:
        setattr(module, key, nn.Parameter(value.to(dtype), requires_grad=False))


def _fill_head(model: Any, file: GGUFFile, weights: GGUFWeights, dtype: torch.dtype) -> None:
    """Fill the LM head, which is the embedding if the file has no other."""
    head = model.get_output_embeddings()
    prefix = next(name for name, module in model.named_modules() if module is head)
    if not model.config.tie_word_embeddings:
        for key, weight in list(head._parameters.items()):
            if weight is not None:
                _fill(model, prefix, key, _checked(file, weights, f"{prefix}.{key}", weight.shape), dtype)
        return
    table = model.get_input_embeddings()
    if isinstance(table, BlockEmbedding):
        model.set_submodule(prefix, BlockLinear(table.blocks, None, table.dtype))
    else:
        head.weight = table.weight


def rotary_factors(file: GGUFFile) -> torch.Tensor | None:
    """Return the divisors of the rotary frequencies [D / 2], or None."""
    tensor = file.tensors.get(ROTARY_FACTORS)
    return None if tensor is None else torch.from_numpy(tensor.data.view(np.float32).copy())


def _restore_buffers(model: Any, file: GGUFFile) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors of the file."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()  # does nothing to parameters, which are on the meta device
    factors = rotary_factors(file)
    if factors is None or file.architecture == "gemma4":
        return
    for module in model.modules():
        if "inv_freq" in module._buffers:
            module.inv_freq /= factors.view(module.inv_freq.shape)
