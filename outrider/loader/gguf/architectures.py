"""The architectures of GGUF files: the configuration that their fields describe, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from types import MappingProxyType
from typing import Any

import numpy as np

from outrider.errors import OutriderError, UnsupportedModel
from outrider.loader.gguf.file import GGUFFile

Settings = dict[str, Any]
_FOLDER = "use the folder of the Hugging Face model"
# Fields that all architectures have, by their names in transformers.
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
)
_TOKENS = ("bos_token_id", "eos_token_id")
# The modules of a decoder layer in transformers, and the names of their tensors.
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
)
_FUSED = MappingProxyType({"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"})
# Layers with a norm of the output of attention, too.
_POST_NORMS = MappingProxyType(
    {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
_GEMMA_27B_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the files of an architecture describe a model of transformers."""

    model_type: str  # in transformers
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)  # names of the tensors of a layer, by module
    permuted: bool = False  # whether the rows of q and k have the two halves of a rotary head as neighbors
    norms_plus_one: bool = False  # whether the weights of the norms are those of transformers plus one
    settings: Callable[[GGUFFile, Settings], Settings] | None = None  # what the architecture adds to `_FIELDS`


def _llama(file: GGUFFile, common: Settings) -> Settings:
    if file.size("expert_count", 0):
        raise UnsupportedModel(f"{file.path} has experts, which are not supported in GGUF files; {_FOLDER}")
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _phi3(file: GGUFFile, common: Settings) -> Settings:
    rotated = file.size("rope.dimension_count", common["head_dim"])
    rope = common["rope_parameters"] | {"partial_rotary_factor": rotated / common["head_dim"]}
    settings: Settings = {"rope_parameters": rope}
    original = file.size("rope.scaling.original_context_length", common["max_position_embeddings"])
    settings["original_max_position_embeddings"] = original
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": _floats(file, "rope_factors_long.weight"),
            "short_factor": _floats(file, "rope_factors_short.weight"),
            "attention_factor": file.size("rope.scaling.attn_factor", 1.0),
        }
    return settings


def _gemma2(file: GGUFFile, common: Settings) -> Settings:
    return _gemma_scale(file, common) | {
        "sliding_window": file.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.size("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.size("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFFile, common: Settings) -> Settings:
    window = file.size("attention.sliding_window", 0)
    local = {"rope_type": "default", "rope_theta": file.size("rope.freq_base_swa", 10000.0)}
    settings = _gemma_scale(file, common) | {
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
        "sliding_window": window or None,
        "final_logit_softcapping": file.size("final_logit_softcapping", 0.0) or None,
    }
    layers = range(common["num_hidden_layers"])
    pattern = file.size("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        sliding = [bool(each) for each in pattern]
    else:
        sliding = [(i + 1) % pattern > 0 for i in layers]
    kinds = ("full_attention", "sliding_attention")
    settings["layer_types"] = [kinds[sliding[i] and window > 0] for i in layers]
    return settings


def _gemma_scale(file: GGUFFile, common: Settings) -> Settings:
    """Return what scales the attention scores. llama.cpp knows the models with 27B parameters by their layers."""
    if common["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        return {"query_pre_attn_scalar": common["hidden_size"] // common["num_attention_heads"]}
    return {"query_pre_attn_scalar": common["head_dim"]}


def _granite(file: GGUFFile, common: Settings) -> Settings:
    return _llama(file, common) | {
        "embedding_multiplier": file.size("embedding_scale", 1.0),
        "residual_multiplier": file.size("residual_scale", 1.0),
        "attention_multiplier": file.size("attention.scale", common["head_dim"] ** -0.5),
        "logits_scaling": file.size("logit_scale"),
    }


def _olmo2(file: GGUFFile, common: Settings) -> Settings:
    if file.size("attention.sliding_window", 0):
        raise UnsupportedModel(f"{file.path} is an OLMo 3 model, which is not supported as a GGUF file; {_FOLDER}")
    return {}


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(model_type="llama", permuted=True, settings=_llama),
        "mistral": Architecture(model_type="mistral", permuted=True),
        "qwen2": Architecture(model_type="qwen2"),
        "qwen3": Architecture(model_type="qwen3"),
        "phi3": Architecture(model_type="phi3", layer=_LAYER | _FUSED, settings=_phi3),
        "gemma": Architecture(model_type="gemma", norms_plus_one=True),
        "gemma2": Architecture(model_type="gemma2", layer=_LAYER | _POST_NORMS, norms_plus_one=True, settings=_gemma2),
        "gemma3": Architecture(
            model_type="gemma3_text", layer=_LAYER | _POST_NORMS, norms_plus_one=True, settings=_gemma3
        ),
        "granite": Architecture(model_type="granite", permuted=True, settings=_granite),
        "olmo2": Architecture(model_type="olmo2", layer=_LAYER | _POST_NORMS, settings=_olmo2),
        "smollm3": Architecture(model_type="smollm3", permuted=True),
    }
)


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file.

    Raises:
        UnsupportedModel: it is not supported.
    """
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{file.path} is a GGUF file of the architecture {file.architecture!r}; supported are"
            f" {', '.join(ARCHITECTURES)}; {_FOLDER}"
        )
    return found


def settings_of(file: GGUFFile) -> Settings:
    """Return the settings of the configuration in transformers.

    Raises:
        OutriderError: a field is missing.
        UnsupportedModel: the architecture or its rotary embedding is not supported.
    """
    architecture = architecture_of(file)
    settings: Settings = {name: file.size(key) for name, key in _FIELDS.items()}
    heads = settings["num_attention_heads"]
    settings["num_key_value_heads"] = file.size("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(settings["num_key_value_heads"], list):
        raise UnsupportedModel(f"{file.path} has layers with different numbers of heads; {_FOLDER}")
    settings["head_dim"] = file.size("attention.key_length", settings["hidden_size"] // heads)
    settings["vocab_size"] = _embedding(file).shape[0]
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    settings["rope_parameters"] = _rope(file, settings)
    settings["pad_token_id"] = None  # a default of transformers, which may be beyond the vocabulary
    for name in _TOKENS:
        settings[name] = file.field(f"tokenizer.ggml.{name}")
    if architecture.settings is not None:
        settings |= architecture.settings(file, settings)
    _check_rotary(file, settings)
    return settings


def _embedding(file: GGUFFile) -> Any:
    if "token_embd.weight" not in file.tensors:
        raise OutriderError(f"{file.path} has no tensor token_embd.weight; download or convert it again")
    return file.tensors["token_embd.weight"]


def _floats(file: GGUFFile, name: str) -> list[float]:
    return list(map(float, file.tensors[name].data.view(np.float32)))


def _rope(file: GGUFFile, settings: Settings) -> Settings:
    """Return the parameters of the rotary embedding."""
    rope: Settings = {"rope_type": "default", "rope_theta": file.size("rope.freq_base", 10000.0)}
    kind = file.size("rope.scaling.type", "none")
    if kind in ("none", "longrope"):  # the factors of longrope are tensors
        return rope
    factor = file.size("rope.scaling.factor")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        # llama.cpp multiplies the factor that YaRN has for this scale by one of the file.
        attention = file.size("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * log(factor))
        original = file.size("rope.scaling.original_context_length", settings["max_position_embeddings"])
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
            "beta_fast": file.size("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": file.size("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModel(
        f"{file.path} has rotary scaling of type {kind}, which is not supported in GGUF files; {_FOLDER}"
    )


def _check_rotary(file: GGUFFile, settings: Settings) -> None:
    """Refuse files that rotate a part of each head, unless the configuration says which part."""
    size = settings["head_dim"]
    rotated = file.size("rope.dimension_count", size)
    if rotated != size and "partial_rotary_factor" not in settings["rope_parameters"]:
        raise UnsupportedModel(
            f"{file.path} rotates {rotated} of {size} dimensions of each head, which is not supported in GGUF"
            f" files; {_FOLDER}"
        )
