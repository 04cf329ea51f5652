"""Models by folder or by size: from a configuration to what passes read, multiply and keep."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError
from outrider.loader.embedded import model_folder
from outrider.project.equations import Attention, Experts, Model

TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_LEAST, _MOST = 1e6, 1e14  # weights of what is given by its size
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MB])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """How many bits numbers have."""

    weights: float = 16.0
    cache: float = 16.0

    def __post_init__(self) -> None:
        for name, value in {"weight bits": self.weights, "cache bits": self.cache}.items():
            if not 0 < value <= 32:
                raise OutriderError(f"{name} are {value}; use for example 16, 8 or 4")


def find_model(name: str, bits: Bits) -> Model:
    """A model by its folder, or by its size.

    Raises:
        OutriderError: it is neither, or a folder whose configuration cannot be projected.
    """
    if (size := name.upper()) in SIZES:
        title, settings = SIZES[size]
        return read_model(settings, bits, name=title)
    if found := _SIZE.fullmatch(name):
        weights = float(found[1]) * (1e9 if found[2].upper() == "B" else 1e6)
        if not _LEAST <= weights <= _MOST:
            raise OutriderError(f"{name} is no size of a model; use one from 1M to 100000B")
        return typical(weights, bits)
    folder = model_folder(name)
    if not (folder / "config.json").is_file():
        raise OutriderError(
            f"{name} is no folder with a config.json, and no size; use a folder, a size such as 8B or 1.5B, or one of"
            f" {', '.join(SIZES)}"
        )
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutriderError(f"{folder / 'config.json'} is no JSON ({error}); mend the file, or use a size") from None
    if not isinstance(settings, dict):
        raise OutriderError(f"{folder / 'config.json'} holds no settings; mend the file, or use a size")
    return read_model(settings, bits, name=folder.resolve().name)


def read_model(settings: Mapping[str, Any], bits: Bits, *, name: str) -> Model:
    """From the settings of a config.json; matrices are counted, norms and biases are too small to matter.

    Raises:
        OutriderError: the architecture is another, or a setting is missing.
    """
    kind = settings.get("model_type")
    if kind not in TYPES:
        raise OutriderError(
            f"{name} is of type {kind!r}, which is not projected; known are {', '.join(TYPES)}. Use a size such as 8B"
        )
    try:
        return _decoder(settings, bits, name)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise OutriderError(f"the configuration of {name} is not sound ({error!r}); mend it, or use a size") from None


def typical(weights: float, bits: Bits) -> Model:
    """A dense model of so many weights, in the proportions of Llama 3: 128 channels a layer, 8 key-value heads of 128.

    A layer of h channels then has about 12.75 h^2 weights, so L layers have 12.75 (128 L)^2 L.
    """
    layers = max(round((weights / (12.75 * 128**2)) ** (1 / 3)), 1)
    seen = Attention(numbers=layers * 2.0 * 8 * 128, products=layers * 2.0 * 128 * layers)
    return Model(
        name=f"{weights / 1e9:g}B, a typical shape",
        layers=layers,
        weights=weights,
        attention=(seen,),
        bits=bits.weights,
        cache_bits=bits.cache,
        int8=bits.weights == 8,
    )


def _decoder(settings: Mapping[str, Any], bits: Bits, name: str) -> Model:
    layers, hidden = settings["num_hidden_layers"], settings["hidden_size"]
    table = settings["vocab_size"] * hidden
    latent = settings.get("kv_lora_rank") is not None
    mixer, numbers, products = _latent(settings) if latent else _grouped(settings)
    dense, experts = _feed_forward(settings)
    return Model(
        name=name,
        layers=layers,
        weights=float(layers * mixer + dense + table),  # the head is read, tied or not
        table=0.0 if settings.get("tie_word_embeddings", False) else float(table),
        experts=experts,
        attention=_windows(settings, numbers, products),
        bits=bits.weights,
        cache_bits=bits.cache,
        int8=bits.weights == 8,
    )


def _grouped(settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of one layer of attention with shared key-value heads: weights, cached numbers, products with a cached token."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    shared = settings.get("num_key_value_heads") or heads
    size = settings.get("head_dim") or hidden // heads
    return 2 * hidden * size * (heads + shared), 2 * shared * size, 2 * heads * size


def _latent(settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """The same of latent attention (DeepSeek 2024): one latent and one rotary key for all heads are cached."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    rank, rotary = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    plain, value = settings["qk_nope_head_dim"], settings["v_head_dim"]
    narrow = settings.get("q_lora_rank")
    asked = heads * (plain + rotary)
    queries = narrow * (hidden + asked) if narrow else hidden * asked
    keys = hidden * (rank + rotary) + rank * heads * (plain + value)
    # Queries and values are taken to the latent's own space: no keys are written out for each head.
    return queries + keys + heads * value * hidden, rank + rotary, heads * (2 * rank + rotary)


def _feed_forward(settings: Mapping[str, Any]) -> tuple[float, Experts | None]:
    """Weights of all layers that every token meets, and the experts."""
    hidden, layers = settings["hidden_size"], settings["num_hidden_layers"]
    count = next((settings[key] for key in _COUNTS if settings.get(key)), 0)
    if not count:
        return 3 * hidden * settings["intermediate_size"] * layers, None
    # Mixtral has no other layers, and its experts are as wide as a dense layer would be.
    size = settings.get("moe_intermediate_size") or settings["intermediate_size"]
    plain = sum(_dense(settings, layer) for layer in range(layers))
    shared = settings.get("shared_expert_intermediate_size") or (settings.get("n_shared_experts") or 0) * size
    everywhere = 3 * hidden * settings["intermediate_size"] * plain
    router = hidden * (count + bool(settings.get("shared_expert_intermediate_size")))  # Qwen2 weighs its shared expert
    experts = Experts(
        count=count, active=settings["num_experts_per_tok"], weights=3.0 * hidden * size * (layers - plain)
    )
    return everywhere + (layers - plain) * (3 * hidden * shared + router), experts


def _dense(settings: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a model with experts has none."""
    if layer < (settings.get("first_k_dense_replace") or 0) or layer in (settings.get("mlp_only_layers") or ()):
        return True
    every = settings.get("decoder_sparse_step") or 1
    return bool((layer + 1) % every)


def _windows(settings: Mapping[str, Any], numbers: float, products: float) -> tuple[Attention, ...]:
    layers, window = settings["num_hidden_layers"], settings.get("sliding_window")
    kinds = settings.get("layer_types")
    if strange := set(kinds or ()) - {"full_attention", "sliding_attention"}:
        raise OutriderError(f"layers of type {', '.join(sorted(strange))} are not projected; use a size such as 8B")
    if not window or not settings.get("use_sliding_window", not str(settings["model_type"]).startswith("qwen")):
        short = 0
    elif kinds:
        short = kinds.count("sliding_attention")
    else:
        short = max(layers - (settings.get("max_window_layers") or 0), 0)
    return tuple(
        Attention(numbers=float(n * numbers), products=float(n * products), window=reach)
        for reach, n in ((None, layers - short), (window, short))
        if n
    )


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _dims(kind: str, *dims: int, **more: Any) -> dict[str, Any]:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {"model_type": kind, **dict(zip((*keys, "vocab_size"), dims, strict=True)), **more}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_QWEN3_EXPERTS: dict[str, Any] = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}

# Names, and settings of published configurations.
SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "0.5B": ("Qwen2.5 0.5B", _dims("qwen2", 896, 24, 14, 2, 4864, 151936, **_TIED)),
        "0.6B": ("Qwen3 0.6B", _dims("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **_TIED)),
        "1B": ("Llama 3.2 1B", _dims("llama", 2048, 16, 32, 8, 8192, 128256, **_TIED)),
        "3B": ("Llama 3.2 3B", _dims("llama", 3072, 28, 24, 8, 8192, 128256, **_TIED)),
        "7B": ("Qwen2.5 7B", _dims("qwen2", 3584, 28, 28, 4, 18944, 152064)),
        "8B": ("Llama 3.1 8B", _dims("llama", 4096, 32, 32, 8, 14336, 128256)),
        "14B": ("Qwen3 14B", _dims("qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128)),
        "32B": ("Qwen3 32B", _dims("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128)),
        "70B": ("Llama 3.1 70B", _dims("llama", 8192, 80, 64, 8, 28672, 128256)),
        "405B": ("Llama 3.1 405B", _dims("llama", 16384, 126, 128, 8, 53248, 128256)),
        "8X7B": (
            "Mixtral 8x7B",
            _dims("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        ),
        "30B-A3B": (
            "Qwen3 30B-A3B",
            _dims("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **_QWEN3_EXPERTS),
        ),
        "235B-A22B": (
            "Qwen3 235B-A22B",
            _dims("qwen3_moe", 4096, 94, 64, 4, 12288, 151936, moe_intermediate_size=1536, **_QWEN3_EXPERTS),
        ),
        "671B-A37B": ("DeepSeek-V3", _dims("deepseek_v3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK)),
    }
)
