"""The architectures of GGUF files with recurrent layers, alone or beside attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from outrider.models.loader.gguf.dense import SCALES, has
from outrider.models.loader.gguf.mixtures import EXPERT_SIZE, GRANITE_ROUTED, NUM_EXPERTS, QWEN_SHARED, granite_experts
from outrider.models.loader.gguf.schema import (
    ATTENTION,
    LAYER,
    PERMUTED,
    TOP,
    Architecture,
    Layout,
    Settings,
    Source,
    experts,
    gated_mlp,
    module,
    renamed,
)

if TYPE_CHECKING:
    from outrider.models.loader.gguf.file import GGUFFile

_FULL = "full_attention"
_LINEAR = "linear_attention"
_NO_CLAMP = 1e-9  # transformers clamps the time step in prefill only


def _log(_config: Any, decay: torch.Tensor) -> torch.Tensor:
    return (-decay.float()).log()


def _flat_log(config: Any, decay: torch.Tensor) -> torch.Tensor:
    return _log(config, decay).flatten()


def _flat(_config: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten()


def _channels(_config: Any, kernel: torch.Tensor) -> torch.Tensor:
    """Return a convolution [C, K] with the dimension of its single input channel."""
    return kernel[:, None]


def mamba(name: str) -> Layout:
    """Return the layout of Mamba in the module `name`."""
    return {
        f"{name}.in_proj": module("ssm_in"),
        f"{name}.x_proj": module("ssm_x"),
        f"{name}.dt_proj": module("ssm_dt"),
        f"{name}.out_proj": module("ssm_out"),
        f"{name}.conv1d.weight": Source(("ssm_conv1d.weight",), _channels),
        f"{name}.conv1d.bias": Source(("ssm_conv1d.bias",)),
        f"{name}.A_log": Source(("ssm_a",), _log),
        f"{name}.D": Source(("ssm_d",)),
        f"{name}.dt_layernorm": module("ssm_dt_norm"),
        f"{name}.b_layernorm": module("ssm_b_norm"),
        f"{name}.c_layernorm": module("ssm_c_norm"),
    }


def mamba2(name: str) -> Layout:
    """Return the layout of Mamba 2 in the module `name`."""
    return {
        f"{name}.in_proj": module("ssm_in"),
        f"{name}.out_proj": module("ssm_out"),
        f"{name}.conv1d.weight": Source(("ssm_conv1d.weight",), _channels),
        f"{name}.conv1d.bias": Source(("ssm_conv1d.bias",)),
        f"{name}.A_log": Source(("ssm_a",), _flat_log),
        f"{name}.D": Source(("ssm_d",), _flat),
        f"{name}.dt_bias": Source(("ssm_dt.bias",)),
        f"{name}.norm.weight": Source(("ssm_norm.weight",), _flat),
    }


_MAMBA2_FIELDS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
}


def _mamba2_head(file: GGUFFile, name: str) -> Settings:
    return {name: file.size("ssm.inner_size") // file.size("ssm.time_step_rank")}


def _conv_types(file: GGUFFile, common: Settings, tensor: str, recurrent: str) -> Settings:
    """Return the types of the layers: `recurrent` where they have a tensor, else full attention."""
    layers = range(common["num_hidden_layers"])
    return {"layer_types": [recurrent if f"blk.{i}.{tensor}" in file.tensors else _FULL for i in layers]}


def _by_key_head(config: Any, count: int) -> torch.Tensor:
    """Return the place in a file of each value head, which transformers has together for each key head."""
    heads = torch.arange(config.linear_num_value_heads)
    order: torch.Tensor = heads.view(-1, config.linear_num_key_heads).T.flatten()
    size = count // len(heads)
    return (order[:, None] * size + torch.arange(size)).flatten()


def _after_keys(config: Any, rows: int) -> torch.Tensor:
    """Return the rows of queries, keys and values. Only the values are reordered."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(before), before + _by_key_head(config, rows - before)])


def _value_columns(config: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight[:, _by_key_head(config, weight.shape[1])]


def _value_channels(config: Any, kernel: torch.Tensor) -> torch.Tensor:
    return kernel[_after_keys(config, len(kernel))][:, None]


def _value_log(config: Any, decay: torch.Tensor) -> torch.Tensor:
    return _log(config, decay)[_by_key_head(config, len(decay))]


def _value_heads(config: Any, values: torch.Tensor) -> torch.Tensor:
    return values[_by_key_head(config, len(values))]


def _qkvz(config: Any, qkv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return queries, keys, values and gates as one matrix, in which they are together for each key head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    parts = (*torch.split(qkv, [keys, keys, len(qkv) - 2 * keys]), gate)
    return torch.cat([part.view(config.linear_num_key_heads, -1, qkv.shape[1]) for part in parts], 1).flatten(0, 1)


_LINEAR_ATTENTION: Layout = {
    "linear_attn.norm": module("ssm_norm"),
    "linear_attn.in_proj_qkvz": module("attn_qkv", "attn_gate", make=_qkvz),
    "linear_attn.in_proj_ba": module("ssm_ba"),
    "linear_attn.out_proj": module("ssm_out"),
    "linear_attn.conv1d.weight": Source(("ssm_conv1d.weight",), _channels),
    "linear_attn.A_log": Source(("ssm_a",), _log),
    "linear_attn.dt_bias": Source(("ssm_dt.bias",)),
}
_TILED_ATTENTION: Layout = {  # with value heads in another order
    "linear_attn.norm": module("ssm_norm"),
    "linear_attn.in_proj_qkv": module("attn_qkv", rows=_after_keys),
    "linear_attn.in_proj_z": module("attn_gate", rows=_by_key_head),
    "linear_attn.in_proj_a": module("ssm_alpha", rows=_by_key_head),
    "linear_attn.in_proj_b": module("ssm_beta", rows=_by_key_head),
    "linear_attn.out_proj": module("ssm_out", make=_value_columns),
    "linear_attn.conv1d.weight": Source(("ssm_conv1d.weight",), _value_channels),
    "linear_attn.A_log": Source(("ssm_a",), _value_log),
    "linear_attn.dt_bias": Source(("ssm_dt.bias",), _value_heads),
}
_NEXT = renamed(LAYER, post_attention_layernorm="post_attention_norm")
_LINEAR_FIELDS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_NEXT_EXPERTS = {**NUM_EXPERTS, **EXPERT_SIZE, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}


def _next(file: GGUFFile, common: Settings) -> Settings:
    return {
        **_conv_types(file, common, "ssm_a", _LINEAR),
        **_mamba2_head(file, "linear_value_head_dim"),
        "norm_topk_prob": True,
    }


def _lfm2(file: GGUFFile, common: Settings) -> Settings:
    return _conv_types(file, common, "shortconv.in_proj.weight", "conv") | {"block_auto_adjust_ff_dim": False}


_LFM2_FIELDS = {
    "rms_norm_eps": None,
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
}
_LFM2_LAYER: Layout = {
    **renamed(
        ATTENTION,
        self_attn__o_proj=None,
        self_attn__out_proj="attn_output",
        self_attn__q_norm=None,
        self_attn__k_norm=None,
        self_attn__q_layernorm="attn_q_norm",
        self_attn__k_layernorm="attn_k_norm",
        input_layernorm=None,
        post_attention_layernorm=None,
        operator_norm="attn_norm",
        ffn_norm="ffn_norm",
        feed_forward__w1="ffn_gate",
        feed_forward__w2="ffn_down",
        feed_forward__w3="ffn_up",
        conv__in_proj="shortconv.in_proj",
        conv__out_proj="shortconv.out_proj",
        feed_forward__gate="ffn_gate_inp",
    ),
    "conv.conv.weight": Source(("shortconv.conv.weight",), _channels),
    "feed_forward.expert_bias": Source(("exp_probs_b.bias",)),
    "feed_forward.experts.gate_up_proj": experts("ffn_gate_exps", "ffn_up_exps"),
    "feed_forward.experts.down_proj": experts("ffn_down_exps"),
}
_LFM2_TOP = renamed(TOP, model__norm=None, model__embedding_norm="token_embd_norm")
_SSM = {
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "intermediate_size": "ssm.inner_size",
    "rms_norm_eps": None,
    "max_position_embeddings": None,
    "num_attention_heads": ("attention.head_count", 0),
}
_BACKBONE: Layout = {
    "backbone.embeddings": module("token_embd"),
    "backbone.norm_f": module("output_norm"),
    "lm_head": module("output"),
}


def _mamba(file: GGUFFile, common: Settings) -> Settings:
    return {"model_type": "falcon_mamba"} if file.size("ssm.dt_b_c_rms", False) else {}


def _falcon_h1(file: GGUFFile, common: Settings) -> Settings:
    """Return settings without factors, which are part of the weights in a file."""
    ones = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **{f"{name}_multiplier": 1.0 for name in ones},
        **_mamba2_head(file, "mamba_d_head"),
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": file.size("ssm.inner_size"),
        "mamba_rms_norm": has(file, "ssm_norm.weight"),
        "attention_bias": has(file, "attn_q.bias"),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
    }


def _nemotron_h(file: GGUFFile, common: Settings) -> Settings:
    kinds = (("ssm_a", _LINEAR), ("attn_q.weight", _FULL), ("ffn_up.weight", "mlp"), ("ffn_gate_inp.weight", "moe"))
    types = []
    for i in range(common["num_hidden_layers"]):
        types.append(next(kind for tensor, kind in kinds if f"blk.{i}.{tensor}" in file.tensors))
    settings: Settings = {"layers_block_type": types, **_mamba2_head(file, "mamba_head_dim")}
    settings["time_step_min"] = _NO_CLAMP
    if "mlp" in types:
        settings["intermediate_size"] = file.tensors[f"blk.{types.index('mlp')}.ffn_up.weight"].shape[0]
    if "moe" in types:
        settings |= {
            "n_routed_experts": file.size("expert_count"),
            "num_experts_per_tok": file.size("expert_used_count"),
            "moe_intermediate_size": file.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": file.size("expert_shared_feed_forward_length"),
            "n_shared_experts": file.size("expert_shared_count", 1),
            "n_group": file.size("expert_group_count", 1),
            "topk_group": file.size("expert_group_used_count", 1),
            "norm_topk_prob": file.size("expert_weights_norm", True),
            "routed_scaling_factor": file.size("expert_weights_scale", 1.0),
        }
    return settings


def _granite_hybrid(file: GGUFFile, common: Settings) -> Settings:
    settings = granite_experts(file, common)
    settings.pop("model_type", None)
    rotates = file.size("rope.scaling.finetuned", True)
    return {
        **settings,
        **_conv_types(file, common, "ssm_a", _LINEAR),
        **_mamba2_head(file, "mamba_d_head"),
        "position_embedding_type": "rope" if rotates else "nope",
        "mamba_expand": file.size("ssm.inner_size") // common["hidden_size"],
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "shared_intermediate_size": file.size("expert_shared_feed_forward_length", file.size("feed_forward_length")),
        "num_local_experts": file.size("expert_count", 0),
        "num_experts_per_tok": file.size("expert_used_count", 0),
    }


def _jamba(file: GGUFFile, common: Settings) -> Settings:
    layers = range(common["num_hidden_layers"])
    attention = [i for i in layers if f"blk.{i}.attn_q.weight" in file.tensors]
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in file.tensors]
    settings: Settings = {"mamba_expand": file.size("ssm.inner_size") // common["hidden_size"]}
    for name, found in (("attn", attention), ("expert", sparse)):
        settings[f"{name}_layer_offset"] = found[0] if found else len(layers)
        settings[f"{name}_layer_period"] = found[1] - found[0] if len(found) > 1 else len(layers)
    return settings


_NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    fields={
        "rms_norm_eps": None,
        "intermediate_size": None,
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
    },
    layer={
        **mamba2("mixer"),
        "mixer.q_proj": module("attn_q"),
        "mixer.k_proj": module("attn_k"),
        "mixer.v_proj": module("attn_v"),
        "mixer.o_proj": module("attn_output"),
        "mixer.up_proj": module("ffn_up"),
        "mixer.down_proj": module("ffn_down"),
        "mixer.gate": module("ffn_gate_inp"),
        "mixer.gate.e_score_correction_bias": Source(("exp_probs_b.bias",)),
        "mixer.experts.up_proj": experts("ffn_up_exps"),
        "mixer.experts.down_proj": experts("ffn_down_exps"),
        "mixer.shared_experts.up_proj": module("ffn_up_shexp"),
        "mixer.shared_experts.down_proj": module("ffn_down_shexp"),
        "norm": module("attn_norm"),
    },
    top={"model.embeddings": module("token_embd"), "model.norm_f": module("output_norm"), "lm_head": module("output")},
    settings=_nemotron_h,
)
_NEXT_35 = {**_NEXT, **_TILED_ATTENTION}

HYBRIDS: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen3next": Architecture(
            model_type="qwen3_next",
            fields={**_NEXT_EXPERTS, **_LINEAR_FIELDS},
            layer={**_NEXT, **_LINEAR_ATTENTION, **QWEN_SHARED},
            norms_plus_one=True,
            partial_rotary=True,
            settings=_next,
        ),
        "qwen35": Architecture(
            model_type="qwen3_5_text",
            fields=_LINEAR_FIELDS,
            layer=_NEXT_35,
            norms_plus_one=True,
            partial_rotary=True,
            settings=_next,
        ),
        "qwen35moe": Architecture(
            model_type="qwen3_5_moe_text",
            fields={**_NEXT_EXPERTS, **_LINEAR_FIELDS, "intermediate_size": None},
            layer={**_NEXT_35, **QWEN_SHARED},
            norms_plus_one=True,
            partial_rotary=True,
            settings=_next,
        ),
        "lfm2": Architecture(model_type="lfm2", fields=_LFM2_FIELDS, layer=_LFM2_LAYER, top=_LFM2_TOP, settings=_lfm2),
        "lfm2moe": Architecture(
            model_type="lfm2_moe",
            fields={**_LFM2_FIELDS, "num_dense_layers": "leading_dense_block_count", **NUM_EXPERTS, **EXPERT_SIZE},
            layer=_LFM2_LAYER,
            top=_LFM2_TOP,
            settings=_lfm2,
        ),
        "mamba": Architecture(
            model_type="mamba",
            fields={**_SSM, "time_step_rank": "ssm.time_step_rank"},
            layers="backbone.layers",
            layer={**mamba("mixer"), "norm": module("attn_norm")},
            top=_BACKBONE,
            settings=_mamba,
        ),
        "mamba2": Architecture(
            model_type="mamba2",
            fields={**_SSM, "num_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count"},
            layers="backbone.layers",
            layer={**mamba2("mixer"), "norm": module("attn_norm")},
            top=_BACKBONE,
            settings=lambda file, common: {
                "expand": file.size("ssm.inner_size") // common["hidden_size"],
                **_mamba2_head(file, "head_dim"),
            },
        ),
        "falcon-h1": Architecture(
            model_type="falcon_h1",
            fields=_MAMBA2_FIELDS,
            layer={
                **renamed(ATTENTION, post_attention_layernorm=None),
                **gated_mlp("feed_forward"),
                **mamba2("mamba"),
                "pre_ff_layernorm.weight": Source(("ffn_norm",)),
            },
            top=renamed(TOP, model__norm=None, model__final_layernorm="output_norm"),
            settings=_falcon_h1,
        ),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
        "granitehybrid": Architecture(
            model_type="granitemoehybrid",
            fields={**SCALES, **_MAMBA2_FIELDS},
            layer={**ATTENTION, **PERMUTED, **GRANITE_ROUTED, **mamba2("mamba")},
            settings=_granite_hybrid,
        ),
        "jamba": Architecture(
            model_type="jamba",
            fields={
                **NUM_EXPERTS,
                "mamba_d_conv": "ssm.conv_kernel",
                "mamba_d_state": "ssm.state_size",
                "mamba_dt_rank": "ssm.time_step_rank",
            },
            layer={
                **renamed(ATTENTION, post_attention_layernorm=None, pre_ff_layernorm="ffn_norm"),
                **gated_mlp("feed_forward"),
                **mamba("mamba"),
                "feed_forward.router": module("ffn_gate_inp"),
                "feed_forward.experts.gate_up_proj": experts("ffn_gate_exps", "ffn_up_exps"),
                "feed_forward.experts.down_proj": experts("ffn_down_exps"),
            },
            top=renamed(TOP, model__norm=None, model__final_layernorm="output_norm"),
            settings=_jamba,
        ),
    }
)
