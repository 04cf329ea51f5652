"""The configuration of models that the native kernels run, read without transformers.

Its names and values are those of transformers. Where a config.json is unusual, transformers reads it instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from outrider.models.native.support import ACTIVATIONS

Settings = dict[str, Any]
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_SCALED = ("llama3", "yarn", "longrope")  # rotary types that depend on the original context length
_LAYER_TYPES = ("full_attention", "sliding_attention")
_UNUSUAL = ("quantization_config", "use_bidirectional_attention", "text_config")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
_GELU = "gelu_pytorch_tanh"
_OLMO_BASE = 500000.0  # of the rotary embedding of layers with a window
# The model types that are read here, and the values that transformers takes if config.json has none.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma": {"tie_word_embeddings": True, "eos_token_id": 1, "hidden_act": _GELU},
        "gemma2": {
            "tie_word_embeddings": True,
            "hidden_activation": _GELU,
            "eos_token_id": 1,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "gemma3_text": {
            "tie_word_embeddings": True,
            "hidden_activation": _GELU,
            "eos_token_id": 1,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
        "granite": {
            "eos_token_id": 2,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        "llama": {"eos_token_id": 2},
        "mistral": {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
        "olmo2": {"eos_token_id": 50279},
        "olmo3": {"eos_token_id": 50279, "sliding_window": 4096},
        "phi3": {"eos_token_id": 32000, "original_max_position_embeddings": 4096},
        "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        "smollm3": {"tie_word_embeddings": True, "eos_token_id": 128001, "num_key_value_heads": 4},
    }
)
_NEEDS_HEAD_DIM = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3"})  # which does not follow from other sizes


class ModelConfig(SimpleNamespace):
    """The configuration of a decoder-only model, with the names of transformers."""

    def get_text_config(self, decoder: bool = False) -> ModelConfig:
        """Return the configuration of the text model, which is all of it."""
        return self

    def to_dict(self) -> Settings:
        """Return the settings by name."""
        return dict(vars(self))


@lru_cache(maxsize=16)
def _read(file: Path, modified: int) -> ModelConfig | None:
    """Read a config.json. It is read again when its modification time changes."""
    try:
        settings = json.loads(file.read_text("utf-8"))
        return make_model_config(settings) if isinstance(settings, dict) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def read_native_config(folder: Path) -> ModelConfig | None:
    """Return the configuration of a model folder.

    Returns:
        None: it is missing, damaged, unusual, or not of a model that the native kernels run.
    """
    file = folder / "config.json"
    try:
        return _read(file, file.stat().st_mtime_ns)
    except OSError:
        return None


def make_model_config(settings: Mapping[str, Any]) -> ModelConfig | None:
    """Return the configuration for the settings of a config.json; None as in `read_native_config`.

    Raises:
        TypeError, ValueError, KeyError: a setting has another form than the model type needs.
    """
    model_type = str(settings.get("model_type"))
    if model_type not in _DEFAULTS or any(settings.get(name) for name in _UNUSUAL):
        return None
    if any(type(settings.get(name)) is not int or settings[name] < 1 for name in _SIZES):
        return None
    if not all(str(name).endswith("ForCausalLM") for name in settings.get("architectures") or ()):
        return None
    common: Settings = {"hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    given = {name: value for name, value in settings.items() if name not in ("rope_scaling", "torch_dtype")}
    config = ModelConfig(**{**common, **_DEFAULTS[model_type], **given})
    config.dtype = _DTYPES.get(str(settings.get("dtype") or settings.get("torch_dtype")))
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        if model_type in _NEEDS_HEAD_DIM or config.hidden_size % config.num_attention_heads:
            return None
        config.head_dim = config.hidden_size // config.num_attention_heads
    if _activation(config) not in ACTIVATIONS or not isinstance(getattr(config, "rms_norm_eps", None), float):
        return None
    _set_layer_types(config)
    config.rope_parameters = _ropes(config, settings)
    return config if _is_sound(config) else None


def _activation(config: ModelConfig) -> str | None:
    """Return the activation of gates, after setting it as transformers does."""
    if config.model_type == "gemma" and getattr(config, "hidden_act", None) == "gelu":
        config.hidden_act = _GELU
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def _set_layer_types(config: ModelConfig) -> None:
    """Set which layers have sliding attention, if the settings do not list it."""
    set_types = _LAYER_TYPE_RULES.get(config.model_type)
    given = getattr(config, "layer_types", None)
    if config.model_type in ("qwen2", "qwen3") and not getattr(config, "use_sliding_window", False):
        config.sliding_window = None
    if config.model_type == "smollm3" and getattr(config, "no_rope_layers", None) is None:
        interval = getattr(config, "no_rope_layer_interval", 4)
        config.no_rope_layers = [int((i + 1) % interval != 0) for i in range(config.num_hidden_layers)]
    if set_types is not None and given is None:
        config.layer_types = [_LAYER_TYPES[set_types(config, i)] for i in range(config.num_hidden_layers)]


def _slides_in_smollm3(config: ModelConfig, layer: int) -> bool:
    uses_window = getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None) is not None
    return uses_window and not config.no_rope_layers[layer]


# Whether a layer has sliding attention.
_LAYER_TYPE_RULES: Mapping[str, Callable[[ModelConfig, int], bool]] = MappingProxyType(
    {
        "gemma2": lambda config, layer: (layer + 1) % 2 > 0,
        "gemma3_text": lambda config, layer: (layer + 1) % getattr(config, "sliding_window_pattern", 6) > 0,
        "olmo3": lambda config, layer: (layer + 1) % 4 > 0,
        "qwen2": lambda config, layer: config.sliding_window is not None and layer >= config.max_window_layers,
        "qwen3": lambda config, layer: config.sliding_window is not None and layer >= config.max_window_layers,
        "smollm3": _slides_in_smollm3,
    }
)


def _ropes(config: ModelConfig, settings: Mapping[str, Any]) -> Settings:
    """Return the rotary parameters as transformers 5 writes them. Older files have them in several settings."""
    scaling = settings.get("rope_scaling")
    given = settings.get("rope_parameters")
    if config.model_type in ("gemma3_text", "olmo3"):  # one for each type of layer
        ropes = {kind: dict((given or {}).get(kind) or {}) for kind in _LAYER_TYPES}
        ropes["full_attention"] |= scaling or {}
        local = settings.get("rope_local_base_freq") if config.model_type == "gemma3_text" else _OLMO_BASE
        theta = {"full_attention": settings.get("rope_theta"), "sliding_attention": local}
        return {kind: _rope(config, rope, theta[kind]) for kind, rope in ropes.items()}
    rope = dict(scaling or given or {})
    if "partial_rotary_factor" in settings:
        rope.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    return _rope(config, rope, settings.get("rope_theta"))


def _rope(config: ModelConfig, rope: Settings, theta: float | None) -> Settings:
    """Complete one set of rotary parameters. A KeyError says that the base is missing."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config.model_type == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
    rope["rope_type"] = kind
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    if not rope["rope_theta"] > 0:
        raise ValueError("the base of the rotary embedding is not positive")
    if kind in _SCALED:
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            rope["original_max_position_embeddings"] = original
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return rope


def _is_sound(config: ModelConfig) -> bool:
    """Return whether lists have an entry for each layer, and the tokens that end a text are ids."""
    ends = config.eos_token_id
    if not all(isinstance(each, int) for each in (ends if isinstance(ends, list) else [ends or 0])):
        return False
    layer_types = getattr(config, "layer_types", None)
    lists = (layer_types, getattr(config, "no_rope_layers", None))
    return all(each is None or len(each) == config.num_hidden_layers for each in lists) and (
        layer_types is None or set(layer_types) <= set(_LAYER_TYPES)
    )
