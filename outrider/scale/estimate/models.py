"""Get the size of a model from its configuration, or from a size such as 8B."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from outrider.errors import OutriderError
from outrider.models.loader.embedded import model_folder, model_name
from outrider.scale.estimate.equations import Attention, Experts, Model

TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_MIN_WEIGHTS, _MAX_WEIGHTS = 1e6, 1e14  # of a model that is given by its size
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MB])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """The number of bits of weights and of cached keys and values."""

    weights: float = 16.0
    cache: float = 16.0

    def __post_init__(self) -> None:
        for name, value in {"weight bits": self.weights, "cache bits": self.cache}.items():
            if not 0 < value <= 32:
                raise OutriderError(f"{name} are {value}; use a number above 0 and up to 32, such as 16, 8 or 4")


def find_model(name: str, bits: Bits) -> Model:
    """Return a model by the name of its folder, or by its size.

    Raises:
        OutriderError: `name` is neither a folder nor a size, or the architecture is not supported.
    """
    if (size := name.upper()) in SIZES:
        title, settings = SIZES[size]
        return read_model(settings, bits, name=title)
    if match := _SIZE.fullmatch(name):
        weights = float(match[1]) * (1e9 if match[2].upper() == "B" else 1e6)
        if not _MIN_WEIGHTS <= weights <= _MAX_WEIGHTS:
            raise OutriderError(f"{name} is not the size of a model; use a size from 1M to 100000B")
        return typical(weights, bits)
    folder = model_folder(name, weights=False)
    if not (folder / "config.json").is_file():
        raise OutriderError(
            f"{name} is neither a folder with a config.json nor a size; use a folder, a size such"
            f" as 8B or 1.5B, or one of {', '.join(SIZES)}"
        )
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutriderError(
            f"{folder / 'config.json'} is not valid JSON ({error}); fix the file, or use a size"
        ) from None
    if not isinstance(settings, dict):
        raise OutriderError(f"{folder / 'config.json'} is not a JSON object; fix the file, or use a size")
    return read_model(settings, bits, name=model_name(name))


def read_model(settings: Mapping[str, Any], bits: Bits, *, name: str) -> Model:
    """Return a model from the settings of a config.json. Only matrices count; norms and biases are negligible.

    Raises:
        OutriderError: the architecture is not supported, or a setting is missing.
    """
    kind = settings.get("model_type")
    if kind not in TYPES:
        raise OutriderError(
            f"{name} has the model type {kind!r}, which is not one of {', '.join(TYPES)}; use a size such as 8B"
        )
    try:
        return _decoder(settings, bits, name)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise OutriderError(f"the configuration of {name} is invalid ({error!r}); fix it, or use a size") from None


def typical(weights: float, bits: Bits) -> Model:
    """Return a dense model with this many weights, in the proportions of Llama 3.

    L layers have a hidden size of h = 128 L and 8 key-value heads of 128. A layer has about 12.75
    h^2 weights, so the model has 12.75 (128 L)^2 L.
    """
    layers = max(round((weights / (12.75 * 128**2)) ** (1 / 3)), 1)
    attention = Attention(numbers=layers * 2.0 * 8 * 128, products=layers * 2.0 * 128 * layers)
    return Model(
        name=f"{weights / 1e9:g}B, a typical shape",
        layers=layers,
        weights=weights,
        attention=(attention,),
        bits=bits.weights,
        cache_bits=bits.cache,
        int8=bits.weights == 8,
        hidden=128.0 * layers,
    )


class _LayerAttention(NamedTuple):
    """The attention of one layer."""

    weights: float
    numbers: float  # cached numbers per token
    products: float  # products of one token with one cached token


def _decoder(settings: Mapping[str, Any], bits: Bits, name: str) -> Model:
    """Return a decoder of one of `TYPES`."""
    layers = settings["num_hidden_layers"]
    table = settings["vocab_size"] * settings["hidden_size"]
    uses_latent = settings.get("kv_lora_rank") is not None
    attention = _latent_attention(settings) if uses_latent else _grouped_attention(settings)
    dense, experts = _feed_forward(settings)
    return Model(
        name=name,
        layers=layers,
        weights=float(layers * attention.weights + dense + table),  # a pass reads the output layer, tied or not
        table=0.0 if settings.get("tie_word_embeddings", False) else float(table),
        experts=experts,
        attention=_windows(settings, attention),
        bits=bits.weights,
        cache_bits=bits.cache,
        int8=bits.weights == 8,
        hidden=float(settings["hidden_size"]),
        output=float(table),
    )


def _grouped_attention(settings: Mapping[str, Any]) -> _LayerAttention:
    """Return attention whose query heads share key-value heads."""
    hidden = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads") or heads
    head_dim = settings.get("head_dim") or hidden // heads
    return _LayerAttention(
        weights=2 * hidden * head_dim * (heads + kv_heads),
        numbers=2 * kv_heads * head_dim,
        products=2 * heads * head_dim,
    )


def _latent_attention(settings: Mapping[str, Any]) -> _LayerAttention:
    """Return latent attention (DeepSeek 2024), which caches one latent and one rotary key for all heads."""
    hidden = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    rank = settings["kv_lora_rank"]
    rotary_dim = settings["qk_rope_head_dim"]
    plain_dim = settings["qk_nope_head_dim"]
    value_dim = settings["v_head_dim"]
    query_rank = settings.get("q_lora_rank")
    query_dim = heads * (plain_dim + rotary_dim)
    queries = query_rank * (hidden + query_dim) if query_rank else hidden * query_dim
    keys = hidden * (rank + rotary_dim) + rank * heads * (plain_dim + value_dim)
    # Attention runs in the space of the latent, so keys and values of single heads are not computed.
    return _LayerAttention(
        weights=queries + keys + heads * value_dim * hidden,
        numbers=rank + rotary_dim,
        products=heads * (2 * rank + rotary_dim),
    )


def _feed_forward(settings: Mapping[str, Any]) -> tuple[float, Experts | None]:
    """Return the feed-forward weights that every token uses, of all layers together, and the experts."""
    hidden = settings["hidden_size"]
    layers = settings["num_hidden_layers"]
    count = next((settings[key] for key in _EXPERT_COUNTS if settings.get(key)), 0)
    if not count:
        return 3 * hidden * settings["intermediate_size"] * layers, None
    # Mixtral has no dense layers, and `intermediate_size` is the size of its experts.
    size = settings.get("moe_intermediate_size") or settings["intermediate_size"]
    dense_layers = sum(_is_dense(settings, layer) for layer in range(layers))
    expert_layers = layers - dense_layers
    shared_size = settings.get("shared_expert_intermediate_size") or (settings.get("n_shared_experts") or 0) * size
    dense = 3 * hidden * settings["intermediate_size"] * dense_layers
    # Qwen2 has a gate for its shared expert.
    router = hidden * (count + bool(settings.get("shared_expert_intermediate_size")))
    experts = Experts(count=count, active=settings["num_experts_per_tok"], weights=3.0 * hidden * size * expert_layers)
    return dense + expert_layers * (3 * hidden * shared_size + router), experts


def _is_dense(settings: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of a model with experts has no experts."""
    if layer < (settings.get("first_k_dense_replace") or 0) or layer in (settings.get("mlp_only_layers") or ()):
        return True
    period = settings.get("decoder_sparse_step") or 1
    return bool((layer + 1) % period)


def _windows(settings: Mapping[str, Any], attention: _LayerAttention) -> tuple[Attention, ...]:
    """Return the attention of all layers, by full attention and sliding windows."""
    layers = settings["num_hidden_layers"]
    window = settings.get("sliding_window")
    layer_types = settings.get("layer_types")
    if unsupported := set(layer_types or ()) - {"full_attention", "sliding_attention"}:
        raise OutriderError(f"layers of type {', '.join(sorted(unsupported))} are not supported; use a size such as 8B")
    if not window or not settings.get("use_sliding_window", not str(settings["model_type"]).startswith("qwen")):
        sliding = 0
    elif layer_types:
        sliding = layer_types.count("sliding_attention")
    else:
        sliding = max(layers - (settings.get("max_window_layers") or 0), 0)
    return tuple(
        Attention(
            numbers=float(count * attention.numbers), products=float(count * attention.products), window=window_size
        )
        for window_size, count in ((None, layers - sliding), (window, sliding))
        if count
    )


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # settings with the number of experts


def _dims(kind: str, *dims: int, **more: Any) -> dict[str, Any]:
    """Return settings of a config.json: the sizes in the order of `keys`, and `more`."""
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

# Titles and settings of published configurations, by size.
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
