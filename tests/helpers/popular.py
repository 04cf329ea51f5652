"""The configurations of popular checkpoints, with fewer layers."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PHI_FACTORS = [1.0 + 0.02 * i for i in range(48)]

# Name -> class of the configuration and its settings. The native kernels run all of them.
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama-3.2-1B": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_parameters": _LLAMA3,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Qwen2.5-0.5B": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "Qwen3-0.6B": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "Mistral-7B": (
        "MistralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 1,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "SmolLM2-135M": (
        "LlamaConfig",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3-3B": (
        "SmolLM3Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-270m": (
        "Gemma3TextConfig",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "num_hidden_layers": 6,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "Phi-4-mini": (
        "Phi3Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_hidden_layers": 1,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": _PHI_FACTORS,
                "long_factor": _PHI_FACTORS,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": True,
            "sliding_window": 262144,
        },
    ),
}
# Sizes of small models, in place of the real ones.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def popular_config(name: str, *, vocab: int) -> PreTrainedConfig:
    """Return the configuration of a checkpoint with fewer layers and another vocabulary size."""
    return _config(name, {}, vocab)


def small_config(name: str, *, vocab: int) -> PreTrainedConfig:
    """Return a configuration of the same kind with small layers."""
    settings = CHECKPOINTS[name][1]
    small = dict(_SMALL)
    if "query_pre_attn_scalar" in settings:
        small["query_pre_attn_scalar"] = small["head_dim"]
    if settings.get("partial_rotary_factor"):
        factors = _PHI_FACTORS[:6]  # for half of the 12 rotated dimensions
        small["rope_parameters"] = settings["rope_parameters"] | {"short_factor": factors, "long_factor": factors}
        del small["max_position_embeddings"]
    return _config(name, small, vocab)


def _config(name: str, sizes: Mapping[str, Any], vocab: int) -> PreTrainedConfig:
    class_name, settings = CHECKPOINTS[name]
    common = {"vocab_size": vocab, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config: PreTrainedConfig = getattr(transformers, class_name)(**common | tokens | dict(settings) | dict(sizes))
    return config
