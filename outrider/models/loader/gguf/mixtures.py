"""The architectures of GGUF files with attention and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from outrider.models.loader.gguf.dense import HUNYUAN, SCALES, attention_scale, biases, has, windows
from outrider.models.loader.gguf.schema import (
    ATTENTION,
    LAYER,
    PERMUTED,
    Architecture,
    Layout,
    Settings,
    Source,
    experts,
    gated_mlp,
    module,
    renamed,
    stacked,
)

if TYPE_CHECKING:
    from outrider.models.loader.gguf.file import GGUFFile

_SIGMOID = 2  # a gating function
_GATE_UP = (experts("ffn_gate_exps", "ffn_up_exps"), experts("ffn_gate_up_exps"))
_DOWN = experts("ffn_down_exps")
_ROUTED: Layout = {
    "mlp.gate": module("ffn_gate_inp"),
    "mlp.experts.gate_up_proj": _GATE_UP,
    "mlp.experts.down_proj": _DOWN,
}
_SHARED: Layout = gated_mlp("mlp.shared_experts", "_shexp")
_CORRECTION: Layout = {"mlp.gate.e_score_correction_bias": Source(("exp_probs_b.bias",))}
_DEEPSEEK: Layout = {**LAYER, **_ROUTED, **_SHARED, **_CORRECTION}
QWEN_SHARED: Layout = {
    **_ROUTED,
    **gated_mlp("mlp.shared_expert", "_shexp"),
    "mlp.shared_expert_gate": module("ffn_gate_inp_shexp"),
}
GRANITE_ROUTED: Layout = {
    "block_sparse_moe.router": module("ffn_gate_inp"),
    "block_sparse_moe.experts.gate_up_proj": _GATE_UP,
    "block_sparse_moe.experts.down_proj": _DOWN,
    "shared_mlp.input_linear": (
        module("ffn_gate_shexp", "ffn_up_shexp", make=stacked),
        module("ffn_gate", "ffn_up", make=stacked),
    ),
    "shared_mlp.output_linear": (module("ffn_down_shexp"), module("ffn_down")),
}
USED = {"num_experts_per_tok": "expert_used_count"}
NUM_EXPERTS = {"num_experts": "expert_count", **USED}
LOCAL_EXPERTS = {"num_local_experts": "expert_count", **USED}
EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_SHARED_FIELDS = {
    "n_routed_experts": "expert_count",
    **USED,
    **EXPERT_SIZE,
    "n_shared_experts": ("expert_shared_count", 0),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
}


def mlp_types(file: GGUFFile, common: Settings) -> Settings:
    """Return which layers have experts."""
    kinds = ("dense", "sparse")
    layers = range(common["num_hidden_layers"])
    return {"mlp_layer_types": [kinds[f"blk.{i}.ffn_gate_inp.weight" in file.tensors] for i in layers]}


def granite_experts(file: GGUFFile, common: Settings) -> Settings:
    """Return the experts of a Granite model, and the factors of all Granite models."""
    shared = file.size("expert_shared_feed_forward_length", 0)
    settings = {**attention_scale(file, common), "attention_bias": has(file, "attn_q.bias")}
    return settings | ({"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {})


def _gpt_oss(file: GGUFFile, common: Settings) -> Settings:
    settings = windows(2)(file, common)
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {**settings, "rope_parameters": rope, "attention_bias": has(file, "attn_q.bias")}


def _alternating(_config: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gate and up matrices [F, H] as one matrix [H, 2 F] whose columns alternate."""
    return torch.stack([gate, up], 1).flatten(0, 1).T


def _alternating_biases(_config: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the biases [E, F] of gate and up as [E, 2 F]."""
    return torch.stack([gate, up], -1).flatten(1)


def _transposed(_config: Any, *parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts).T


def _kv_b(config: Any, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys [heads, rank, D] and values [heads, Dv, rank] as one matrix."""
    return torch.cat([key.transpose(1, 2), value], 1).flatten(0, 1)


def _deepseek(file: GGUFFile, common: Settings) -> Settings:
    """Return the settings of latent attention, and whether the model is of the second or the third version."""
    rotated = file.size("rope.dimension_count")
    size = file.size("attention.key_length_mla", file.size("attention.key_length"))
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn":
        scale = file.size("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale, "mscale_all_dim": scale, "attention_factor": None}
    heads = common["num_attention_heads"]
    groups = common["n_group"]
    settings: Settings = {
        "num_key_value_heads": heads,
        "q_lora_rank": file.size("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": file.size("attention.value_length_mla", file.size("attention.value_length")),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "rope_parameters": rope,
    }
    if file.size("expert_gating_func", 0) == _SIGMOID:
        settings["model_type"] = "deepseek_v3"
    return settings


def _llama4(file: GGUFFile, common: Settings) -> Settings:
    """Return the settings that all Llama 4 models have, and llama.cpp keeps as constants."""
    step = file.size("interleave_moe_layer_step", 1)
    return {
        "intermediate_size": file.size("expert_feed_forward_length"),
        "intermediate_size_mlp": file.size("feed_forward_length"),
        "interleave_moe_layer_step": step,
        "use_qk_norm": file.size("expert_count") != 128,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _llama(file: GGUFFile, common: Settings) -> Settings:
    """Return the settings of Llama models, which may have experts."""
    if not file.size("expert_count", 0):
        return biases(file, common)
    return {
        "model_type": "mixtral",
        "num_local_experts": file.size("expert_count"),
        "num_experts_per_tok": file.size("expert_used_count"),
        "sliding_window": None,
    }


def _ernie(file: GGUFFile, common: Settings) -> Settings:
    return {
        "use_bias": has(file, "attn_q.bias"),
        "moe_num_shared_experts": file.size("expert_shared_count", 0),
        "moe_layer_start_index": file.size("leading_dense_block_count", 0),
        "moe_layer_end_index": common["num_hidden_layers"] - 1,
    }


_MLA: Layout = {
    **renamed(_DEEPSEEK, self_attn__k_proj=None, self_attn__v_proj=None),
    "self_attn.q_a_proj": module("attn_q_a"),
    "self_attn.q_a_layernorm": module("attn_q_a_norm"),
    "self_attn.q_b_proj": module("attn_q_b"),
    "self_attn.kv_a_proj_with_mqa": module("attn_kv_a_mqa"),
    "self_attn.kv_a_layernorm": module("attn_kv_a_norm"),
    "self_attn.kv_b_proj": (module("attn_k_b", "attn_v_b", make=_kv_b), module("attn_kv_b")),
}
_LLAMA4_LAYER: Layout = {
    **ATTENTION,
    **gated_mlp("feed_forward"),
    **gated_mlp("feed_forward.shared_expert", "_shexp"),
    "feed_forward.router": module("ffn_gate_inp"),
    "feed_forward.experts.gate_up_proj": experts("ffn_gate_exps", "ffn_up_exps", make=_transposed),
    "feed_forward.experts.down_proj": experts("ffn_down_exps", make=_transposed),
}
_GPT_OSS_LAYER: Layout = {
    **renamed(ATTENTION, post_attention_layernorm="post_attention_norm"),
    "self_attn.sinks": Source(("attn_sinks.weight",)),
    "mlp.router": module("ffn_gate_inp"),
    "mlp.experts.gate_up_proj": experts("ffn_gate_exps", "ffn_up_exps", make=_alternating),
    "mlp.experts.gate_up_proj_bias": Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternating_biases),
    "mlp.experts.down_proj": experts("ffn_down_exps", make=_transposed),
    "mlp.experts.down_proj_bias": Source(("ffn_down_exps.bias",)),
}
_AFMOE_LAYER: Layout = {
    **renamed(
        {**LAYER, **_SHARED},
        post_attention_layernorm="post_attention_norm",
        pre_mlp_layernorm="ffn_norm",
        post_mlp_layernorm="post_ffw_norm",
        self_attn__gate_proj="attn_gate",
        mlp__router__gate="ffn_gate_inp",
    ),
    "mlp.expert_bias": Source(("exp_probs_b.bias",)),
    "mlp.experts.gate_up_proj": _GATE_UP,
    "mlp.experts.down_proj": _DOWN,
}

MIXTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(model_type="llama", layer={**LAYER, **PERMUTED, **_ROUTED}, settings=_llama),
        "qwen2moe": Architecture(
            model_type="qwen2_moe",
            fields={
                **NUM_EXPERTS,
                **EXPERT_SIZE,
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            },
            constants={"norm_topk_prob": False},
            layer={**ATTENTION, **QWEN_SHARED},
        ),
        "qwen3moe": Architecture(
            model_type="qwen3_moe",
            fields={**NUM_EXPERTS, **EXPERT_SIZE},
            constants={"norm_topk_prob": True},
            layer={**ATTENTION, **_ROUTED},
        ),
        "olmoe": Architecture(
            model_type="olmoe", fields=NUM_EXPERTS, constants={"norm_topk_prob": False}, layer={**ATTENTION, **_ROUTED}
        ),
        "granitemoe": Architecture(
            model_type="granitemoe",
            fields={**LOCAL_EXPERTS, **SCALES},
            layer={**ATTENTION, **PERMUTED, **GRANITE_ROUTED},
            settings=granite_experts,
        ),
        "gpt-oss": Architecture(
            model_type="gpt_oss",
            fields={**LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
            layer=_GPT_OSS_LAYER,
            settings=_gpt_oss,
        ),
        "glm4moe": Architecture(
            model_type="glm4_moe",
            fields=_SHARED_FIELDS,
            layer=renamed(_DEEPSEEK, post_attention_layernorm="post_attention_norm"),
            partial_rotary=True,
            settings=lambda file, common: {
                "use_qk_norm": has(file, "attn_q_norm.weight"),
                "attention_bias": has(file, "attn_q.bias"),
            },
        ),
        "deepseek2": Architecture(
            model_type="deepseek_v2",
            fields={**_SHARED_FIELDS, "kv_lora_rank": "attention.kv_lora_rank"},
            layer=_MLA,
            settings=_deepseek,
        ),
        "llama4": Architecture(model_type="llama4_text", fields=LOCAL_EXPERTS, layer=_LLAMA4_LAYER, settings=_llama4),
        "ernie4_5-moe": Architecture(
            model_type="ernie4_5_moe",
            fields={"moe_num_experts": "expert_count", "moe_k": "expert_used_count", **EXPERT_SIZE},
            layer={
                **LAYER,
                **_ROUTED,
                **_SHARED,
                "mlp.gate.moe_statics.e_score_correction_bias": Source(
                    ("exp_probs_b.bias",), lambda _config, bias: bias.view(1, -1)
                ),
            },
            settings=_ernie,
        ),
        "dots1": Architecture(
            model_type="dots1",
            fields=_SHARED_FIELDS,
            layer=_DEEPSEEK,
            settings=lambda file, common: {"layer_types": ["full_attention"] * common["num_hidden_layers"]},
        ),
        "exaone-moe": Architecture(
            model_type="exaone_moe",
            fields={**_SHARED_FIELDS, "num_experts": "expert_count", "num_shared_experts": "expert_shared_count"},
            layer=_DEEPSEEK,
            settings=lambda file, common: windows(4)(file, common) | mlp_types(file, common),
        ),
        "afmoe": Architecture(
            model_type="afmoe",
            fields={
                **NUM_EXPERTS,
                **EXPERT_SIZE,
                "num_shared_experts": "expert_shared_count",
                "num_dense_layers": ("leading_dense_block_count", 0),
                "route_scale": ("expert_weights_scale", 1.0),
            },
            constants={"mup_enabled": True},
            layer=_AFMOE_LAYER,
            settings=windows(4),
        ),
        "minimax-m2": Architecture(
            model_type="minimax_m2",
            fields=LOCAL_EXPERTS,
            layer={**ATTENTION, **_ROUTED, "mlp.e_score_correction_bias": Source(("exp_probs_b.bias",))},
            partial_rotary=True,
            settings=lambda file, common: {
                "intermediate_size": file.size("expert_feed_forward_length"),
                "rotary_dim": file.size("rope.dimension_count", common["head_dim"]),
            },
        ),
        "hunyuan-moe": Architecture(
            model_type="hunyuan_v1_moe",
            fields={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
            layer={
                **renamed(HUNYUAN, mlp__gate_proj=None, mlp__up_proj=None, mlp__down_proj=None),
                "mlp.gate.wg": module("ffn_gate_inp"),
                "mlp.experts.gate_up_proj": _GATE_UP,
                "mlp.experts.down_proj": _DOWN,
                **gated_mlp("mlp.shared_mlp", "_shexp"),
            },
        ),
        "mellum": Architecture(
            model_type="mellum",
            fields={**LOCAL_EXPERTS, **EXPERT_SIZE},
            constants={"norm_topk_prob": True},
            layer={**LAYER, **_ROUTED},
            settings=lambda file, common: windows(4, two_ropes=True)(file, common) | mlp_types(file, common),
        ),
    }
)
