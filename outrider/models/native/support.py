"""The models that the native kernels may run, from their configuration alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from outrider.models.native.library import is_available

MAX_HEAD_DIM = 256  # kMaxHeadDim of attention.h
MAX_QUERIES_PER_KEY_HEAD = 48  # kMaxTileRows of attention.h
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of gates


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the decoder layers of a model type are built. The names are those of modules in transformers.

    A layer consists of rotary attention and a gated MLP, or experts of such MLPs. Their inputs,
    their outputs or both have an RMSNorm.
    """

    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    head_norms: bool = False  # whether queries and keys are normalized, each head or all of them
    wide_norms: bool = False  # whether they are normalized over all heads
    norms_plus_one: bool = False  # whether a norm multiplies by 1 + weight
    scaled_table: bool = False  # whether embeddings are multiplied by the square root of the hidden size
    routed: bool = False  # whether there are layers with routed experts
    biases: bool = False  # whether queries, keys and values always have biases


_LLAMA = Family()
_QWEN2 = Family(biases=True)
_GEMMA = Family(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norms_plus_one=True,
    scaled_table=True,
)
_POST_NORMS = Family(
    head_norms=True,
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    wide_norms=True,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma": Family(norms_plus_one=True, scaled_table=True),
        "gemma2": _GEMMA,
        "gemma3_text": replace(_GEMMA, head_norms=True),
        "granite": _LLAMA,
        "llama": _LLAMA,
        "ministral": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": Family(routed=True),
        "olmo2": _POST_NORMS,
        "olmo3": _POST_NORMS,
        "olmoe": Family(routed=True, head_norms=True, wide_norms=True),
        "phi3": Family(attention=("self_attn.qkv_proj",), mlp=("mlp.gate_up_proj",)),
        "qwen2": _QWEN2,
        "qwen2_5_vl_text": _QWEN2,
        "qwen2_vl_text": _QWEN2,
        "qwen3": Family(head_norms=True),
        "qwen3_moe": Family(routed=True, head_norms=True),
        "qwen3_vl_moe_text": Family(routed=True, head_norms=True),
        "qwen3_vl_text": Family(head_norms=True),
        "seed_oss": _LLAMA,
        "smollm3": _LLAMA,
    }
)


def may_run(config: Any) -> bool:
    """Return whether the kernels know the architecture of a configuration, and are prebuilt or can be compiled here.

    The kernels run the text part of a multimodal model.
    """
    return config.get_text_config(decoder=True).model_type in FAMILIES and is_available()
