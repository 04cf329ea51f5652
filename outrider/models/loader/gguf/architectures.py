"""The architectures of GGUF files, and the configuration of transformers that the fields of a file describe."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.gguf.dense import DENSE
from outrider.models.loader.gguf.hybrids import HYBRIDS
from outrider.models.loader.gguf.mixtures import MIXTURES
from outrider.models.loader.gguf.schema import FOLDER, Architecture, Settings

if TYPE_CHECKING:
    from outrider.models.loader.gguf.file import GGUFFile

# Settings that most architectures have, and their fields.
_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
)
DRAFTS = ("eagle3", "dflash")  # draft heads
_TOKENS = ("bos_token_id", "eos_token_id")
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({**MIXTURES, **DENSE, **HYBRIDS})


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel if it is not supported."""
    if file.architecture in DRAFTS:
        raise UnsupportedModel(f"{file.path} is a draft head, which does not run alone; use it as draft:{file.path}")
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{file.path} is a GGUF file of the architecture {file.architecture!r}, which is not supported; {FOLDER}"
        )
    return found


def settings_of(file: GGUFFile) -> Settings:
    """Return the settings of the configuration in transformers, and its model type.

    Raises:
        OutriderError: a field is missing.
        UnsupportedModel: the architecture or its rotary embedding is not supported.
    """
    architecture = architecture_of(file)
    settings: Settings = {"model_type": architecture.model_type, "num_hidden_layers": num_layers(file)}
    for name, key in {**_FIELDS, **architecture.fields}.items():
        if key is not None:
            settings[name] = file.size(key) if isinstance(key, str) else file.size(*key)
    settings["vocab_size"] = _embedding(file).shape[0]
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    settings["rope_parameters"] = _rope(file, settings)
    settings["pad_token_id"] = None  # a default of transformers, which may be beyond the vocabulary
    for name in _TOKENS:
        settings[name] = file.field(f"tokenizer.ggml.{name}")
    if settings["num_attention_heads"]:  # 0: a model without attention
        settings |= _heads(file, settings)
        settings["rope_parameters"] |= _rotated(file, architecture, settings)
    for name, key in architecture.fields.items():
        if key is None:
            settings.pop(name, None)
    settings |= architecture.constants
    return settings if architecture.settings is None else settings | architecture.settings(file, settings)


def num_layers(file: GGUFFile) -> int:
    """Return the number of layers, without those that predict further tokens."""
    return int(file.size("block_count")) - int(file.size("nextn_predict_layers", 0))


def _heads(file: GGUFFile, settings: Settings) -> Settings:
    """Return the heads of the attention layers. Other layers have none."""
    counts = []
    for key in ("attention.head_count", "attention.head_count_kv"):
        value = file.size(key, settings["num_attention_heads"])
        counts.append(sorted(set(value) - {0}) if isinstance(value, list) else [value])
    (heads, *other), keys = counts
    if other or (len(keys) > 1 and file.architecture != "gemma4"):
        raise UnsupportedModel(f"{file.path} has layers with different numbers of heads; {FOLDER}")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys[0] if keys else heads,
        "head_dim": file.size("attention.key_length", settings["hidden_size"] // heads),
    }


def _embedding(file: GGUFFile) -> Any:
    if "token_embd.weight" not in file.tensors:
        raise OutriderError(f"{file.path} has no tensor token_embd.weight; download or convert it again")
    return file.tensors["token_embd.weight"]


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
        f"{file.path} has rotary scaling of type {kind}, which is not supported in GGUF files; {FOLDER}"
    )


def _rotated(file: GGUFFile, architecture: Architecture, settings: Settings) -> Settings:
    """Return which part of each head is rotated. Refuse a part where the configuration cannot say it."""
    size = settings["head_dim"]
    rotated = file.size("rope.dimension_count", size)
    if architecture.partial_rotary:
        return {"partial_rotary_factor": rotated / size}
    if rotated != size and "kv_lora_rank" not in settings:
        raise UnsupportedModel(
            f"{file.path} rotates {rotated} of {size} dimensions of each head, which is not supported in GGUF"
            f" files; {FOLDER}"
        )
    return {}
