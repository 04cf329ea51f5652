"""The configuration of models that the native kernels run, read without transformers.

Its names and values are those of transformers. Where a config.json is unusual, transformers reads it instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

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
_UNUSUAL = ("use_bidirectional_attention", "text_config")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
_GELU = "gelu_pytorch_tanh"
_OLMO_BASE = 500000.0  # of the rotary embedding of layers with a window
_QWEN_VL: Mapping[str, Any] = {
    "eos_token_id": 151645,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_window_layers": 80,
}
# The model types that are read here, and the values that transformers takes if config.json has none.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
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
        "ministral": {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
        "mistral": {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
        "mixtral": {"eos_token_id": 2, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
        "olmo2": {"eos_token_id": 50279},
        "olmo3": {"eos_token_id": 50279, "sliding_window": 4096},
        "olmoe": {"eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        "phi3": {"eos_token_id": 32000, "original_max_position_embeddings": 4096},
        "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        "qwen2_5_vl_text": _QWEN_VL,
        "qwen2_vl_text": _QWEN_VL,
        "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        "qwen3_moe": {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        "qwen3_vl_moe_text": {
            "tie_word_embeddings": True,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
        "seed_oss": {
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        "smollm3": {"tie_word_embeddings": True, "eos_token_id": 128001, "num_key_value_heads": 4},
    }
)
_NEEDS_HEAD_DIM = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3"})  # which does not follow from other sizes
_WINDOW_IF_ASKED = frozenset({"qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_moe"})


class _TextPart(NamedTuple):
    """The text part of a type of multimodal models."""

    body: str  # the module with its decoder layers
    model_type: str  # unless the settings name another
    tied: bool = False  # whether the LM head is the embedding, unless the settings say
    tied_if_text: bool = False  # whether it is if the settings of the text part say so
    flat: bool = False  # whether the settings of the text part may be among those of the whole model


_LANGUAGE = "model.language_model"
TEXT_PARTS: Mapping[str, _TextPart] = MappingProxyType(
    {
        "gemma3": _TextPart(_LANGUAGE, "gemma3_text", tied=True),
        "idefics3": _TextPart("model.text_model", "llama"),
        "internvl": _TextPart(_LANGUAGE, "qwen2", tied=True),
        "llava": _TextPart(_LANGUAGE, "llama", tied_if_text=True),
        "mistral3": _TextPart(_LANGUAGE, "mistral", tied=True),
        "qwen2_5_vl": _TextPart(_LANGUAGE, "qwen2_5_vl_text", tied_if_text=True, flat=True),
        "qwen2_vl": _TextPart(_LANGUAGE, "qwen2_vl_text", tied_if_text=True, flat=True),
        "qwen3_vl": _TextPart(_LANGUAGE, "qwen3_vl_text"),
        "qwen3_vl_moe": _TextPart(_LANGUAGE, "qwen3_vl_moe_text"),
        "smolvlm": _TextPart("model.text_model", "llama"),
    }
)


class ModelConfig(SimpleNamespace):
    """The configuration of a decoder-only model, with the names of transformers."""

    def get_text_config(self, decoder: bool = False) -> ModelConfig:
        """Return the configuration of the text part of a multimodal model; of a text model, all of it."""
        text: ModelConfig = getattr(self, "text_config", self)
        return text

    def to_dict(self) -> Settings:
        text = self.get_text_config()
        return dict(vars(self)) | ({} if text is self else {"text_config": text.to_dict()})


def body_of(config: ModelConfig) -> str:
    """Return the name of the module with the decoder layers of a model."""
    part = TEXT_PARTS.get(config.model_type)
    return "model" if part is None else part.body


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
    part = TEXT_PARTS.get(str(settings.get("model_type")))
    return _text_model(settings) if part is None else _multimodal_model(settings, part)


def _multimodal_model(settings: Mapping[str, Any], part: _TextPart) -> ModelConfig | None:
    """Return the configuration of a model that reads images as well, with that of its text part."""
    inner = settings.get("text_config")
    if inner is None and part.flat:
        outer = ("architectures", "model_type", "quantization_config", "vision_config")
        inner = {name: value for name, value in settings.items() if name not in outer}
    if not isinstance(inner, Mapping):
        return None
    text = _text_model({"model_type": part.model_type} | dict(inner))
    if text is None:
        return None
    given = {name: value for name, value in settings.items() if name != "torch_dtype"}
    config = ModelConfig(**{"tie_word_embeddings": part.tied, **given, "text_config": text})
    if part.tied_if_text and text.tie_word_embeddings:
        config.tie_word_embeddings = True
    config.dtype = _dtype(settings) or text.dtype
    return config


def _dtype(settings: Mapping[str, Any]) -> torch.dtype | None:
    """Return the type in which a checkpoint is stored; None: the settings do not say."""
    return _DTYPES.get(str(settings.get("dtype") or settings.get("torch_dtype")))


def _text_model(settings: Mapping[str, Any]) -> ModelConfig | None:
    """Return the configuration of a text model. Results and errors are those of `make_model_config`."""
    model_type = str(settings.get("model_type"))
    if model_type not in DEFAULTS or any(map(settings.get, _UNUSUAL)):
        return None
    if any(type(settings.get(name)) is not int or settings[name] < 1 for name in _SIZES):
        return None
    if not all(str(name).endswith("ForCausalLM") for name in settings.get("architectures") or ()):
        return None
    common: Settings = {"hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    given = {name: value for name, value in settings.items() if name not in ("rope_scaling", "torch_dtype")}
    config = ModelConfig(**{**common, **DEFAULTS[model_type], **given})
    config.dtype = _dtype(settings)
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        if model_type in _NEEDS_HEAD_DIM or config.hidden_size % config.num_attention_heads:
            return None
        config.head_dim = config.hidden_size // config.num_attention_heads
    if _activation(config) not in ACTIVATIONS or not isinstance(getattr(config, "rms_norm_eps", None), float):
        return None
    if hasattr(config, "num_experts"):  # both names are in use
        config.num_experts = config.num_local_experts = getattr(config, "num_local_experts", config.num_experts)
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
    if config.model_type in _WINDOW_IF_ASKED and not getattr(config, "use_sliding_window", False):
        config.sliding_window = None
    if config.model_type == "smollm3" and getattr(config, "no_rope_layers", None) is None:
        interval = getattr(config, "no_rope_layer_interval", 4)
        config.no_rope_layers = [int((i + 1) % interval != 0) for i in range(config.num_hidden_layers)]
    if set_types is not None and given is None:
        config.layer_types = [_LAYER_TYPES[set_types(config, i)] for i in range(config.num_hidden_layers)]


def _slides_in_smollm3(config: ModelConfig, layer: int) -> bool:
    uses_window = getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None) is not None
    return uses_window and not config.no_rope_layers[layer]


def _slides_in_later_layers(config: ModelConfig, layer: int) -> bool:
    return config.sliding_window is not None and layer >= config.max_window_layers


# Whether a layer has sliding attention.
_LAYER_TYPE_RULES: Mapping[str, Callable[[ModelConfig, int], bool]] = MappingProxyType(
    {
        "gemma2": lambda config, layer: (layer + 1) % 2 > 0,
        "gemma3_text": lambda config, layer: (layer + 1) % getattr(config, "sliding_window_pattern", 6) > 0,
        "olmo3": lambda config, layer: (layer + 1) % 4 > 0,
        "qwen2": _slides_in_later_layers,
        "qwen2_5_vl_text": _slides_in_later_layers,
        "qwen2_vl_text": _slides_in_later_layers,
        "qwen3": _slides_in_later_layers,
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
    if kind == "mrope":  # positions of texts are the same in all of its sections
        kind = "default"
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
