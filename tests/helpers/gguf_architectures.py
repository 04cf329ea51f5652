"""Writes models of many architectures as GGUF files, with the fields and tensors of llama.cpp's converter."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.architectures import EVERY
from tests.helpers.gguf_files import add_tokenizer, add_values

_FIELDS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps norm_epsilon",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k moe_topk top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size"
    " moe_shared_expert_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor route_scale",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace moe_layer_start_index num_dense_layers",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling logit_scale",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "ssm.conv_kernel": "conv_kernel mamba_d_conv linear_conv_kernel_dim",
    "ssm.state_size": "state_size mamba_d_state ssm_state_size linear_key_head_dim",
    "ssm.time_step_rank": "time_step_rank num_heads mamba_n_heads mamba_num_heads mamba_dt_rank linear_num_value_heads",
    "ssm.group_count": "n_groups mamba_n_groups linear_num_key_heads",
    "shortconv.l_cache": "conv_L_cache",
}


Tensors = Iterator[tuple[str, torch.Tensor]]
Change = Callable[[Any, torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Written:
    """How llama.cpp's converter writes an architecture."""

    name: str
    fields: Callable[[Any], Mapping[str, Any]] = lambda config: {}  # beyond those that follow from the settings
    changes: Mapping[str, Change] = field(default_factory=dict)  # of weights whose name ends so
    norms_plus_one: bool = False
    permuted: bool = False


def _halves(gate: str, up: str, *, dim: int = 1) -> Change:
    return lambda config, weight: dict(zip((gate, up), weight.chunk(2, dim), strict=True))


def _only(name: str, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Change:
    return lambda config, weight: {name: change(config, weight)}


def _transposed(_config: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(-1, -2)


def _grouped(tensor: str) -> Change:
    """Rows that transformers has together for each head."""

    def change(config: Any, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        rows = weight.view(config.num_attention_heads, 3, -1, *weight.shape[1:])
        return {tensor: rows.transpose(0, 1).reshape(weight.shape)}

    return change


def _falcon(config: Any, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    keys = config.num_kv_heads if config.new_decoder_architecture else 1
    size = config.hidden_size // config.num_attention_heads
    rows = weight.view(keys, -1, size, weight.shape[1])
    queries, key, value = rows[:, :-2], rows[:, -2], rows[:, -1]
    return {"attn_qkv.weight": torch.cat([part.reshape(-1, weight.shape[1]) for part in (queries, key, value)])}


def _kv_b(config: Any, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
    key, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return {"attn_k_b.weight": key.transpose(1, 2), "attn_v_b.weight": value}


def _qkvz(config: Any, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    keys = config.linear_num_key_heads
    value = config.linear_num_value_heads // keys * config.linear_value_head_dim
    key = config.linear_key_head_dim
    parts = weight.view(keys, -1, weight.shape[1]).split([key, key, value, value], 1)
    query, key_rows, values, gate = (part.flatten(0, 1) for part in parts)
    return {"attn_qkv.weight": torch.cat([query, key_rows, values]), "attn_gate.weight": gate}


def _tiled(config: Any, weight: torch.Tensor, dim: int = 0, skip: int = 0) -> torch.Tensor:
    """Value heads in the order of llama.cpp, after `skip` other rows."""
    before, values = weight.split([skip, weight.shape[dim] - skip], dim)
    heads = (config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, -1)
    tiled = values.unflatten(dim, heads).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([before, tiled], dim)


def _keys(config: Any) -> int:
    return 2 * config.linear_num_key_heads * config.linear_key_head_dim


def _decay(_config: Any, weight: torch.Tensor) -> torch.Tensor:
    return -weight.exp() if weight.dim() > 1 else -weight.exp()[:, None]


def _groups(config: Any, weight: torch.Tensor) -> torch.Tensor:
    groups = getattr(config, "n_groups", None) or config.mamba_n_groups
    return weight.view(groups, -1)


_EXPERTS: dict[str, Change] = {
    "experts.gate_up_proj": _halves("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": lambda config, weight: {"ffn_down_exps.weight": weight},
    "experts.up_proj": lambda config, weight: {"ffn_up_exps.weight": weight},
    "shared_mlp.input_linear.weight": _halves("ffn_gate_shexp.weight", "ffn_up_shexp.weight", dim=0),
    "kv_b_proj.weight": _kv_b,
}
_TRANSPOSED_EXPERTS: dict[str, Change] = {
    "experts.gate_up_proj": lambda config, weight: _EXPERTS["experts.gate_up_proj"](config, weight.transpose(1, 2)),
    "experts.down_proj": _only("ffn_down_exps.weight", _transposed),
}
_ALTERNATING: dict[str, Change] = {
    "experts.gate_up_proj": lambda config, weight: {
        f"ffn_{part}_exps.weight": weight[..., i::2].transpose(1, 2) for i, part in enumerate(("gate", "up"))
    },
    "experts.gate_up_proj_bias": lambda config, weight: {
        f"ffn_{part}_exps.bias": weight[..., i::2] for i, part in enumerate(("gate", "up"))
    },
    "experts.down_proj": _only("ffn_down_exps.weight", _transposed),
    "experts.down_proj_bias": lambda config, weight: {"ffn_down_exps.bias": weight},
    "self_attn.sinks": lambda config, weight: {"attn_sinks.weight": weight},
}
_STATE: dict[str, Change] = {
    "A_log": _only("ssm_a", _decay),
    "mixer.D": lambda config, weight: {"ssm_d": weight},
    "mamba.D": lambda config, weight: {"ssm_d": weight},
    "conv1d.weight": _only("ssm_conv1d.weight", lambda config, weight: weight.squeeze(1)),
}
_STATE2: dict[str, Change] = _STATE | {
    "mixer.D": _only("ssm_d", lambda config, weight: weight[:, None]),
    "mamba.D": _only("ssm_d", lambda config, weight: weight[:, None]),
    "dt_bias": lambda config, weight: {"ssm_dt.bias": weight},
    "mixer.norm.weight": _only("ssm_norm.weight", _groups),
    "mamba.norm.weight": _only("ssm_norm.weight", _groups),
}
_LINEAR: dict[str, Change] = {
    "A_log": _only("ssm_a", lambda config, weight: -weight.exp()),
    "dt_bias": lambda config, weight: {"ssm_dt.bias": weight},
    "conv1d.weight": _only("ssm_conv1d.weight", lambda config, weight: weight.squeeze(1)),
    "in_proj_qkvz.weight": _qkvz,
}
_TILED: dict[str, Change] = {
    "A_log": _only("ssm_a", lambda config, weight: _tiled(config, -weight.exp())),
    "dt_bias": _only("ssm_dt.bias", _tiled),
    "conv1d.weight": _only(
        "ssm_conv1d.weight", lambda config, weight: _tiled(config, weight.squeeze(1), 0, _keys(config))
    ),
    "in_proj_qkv.weight": _only("attn_qkv.weight", lambda config, weight: _tiled(config, weight, 0, _keys(config))),
    "in_proj_z.weight": _only("attn_gate.weight", _tiled),
    "in_proj_a.weight": _only("ssm_alpha.weight", _tiled),
    "in_proj_b.weight": _only("ssm_beta.weight", _tiled),
    "linear_attn.out_proj.weight": _only("ssm_out.weight", lambda config, weight: _tiled(config, weight, 1)),
}
_ALTUP: dict[str, Change] = {"correct_output_scale": lambda config, weight: {"altup_correct_scale.weight": weight}}
_GPT2: dict[str, Change] = {
    "attn.c_attn.weight": _only("attn_qkv.weight", _transposed),
    "attn.c_proj.weight": _only("attn_output.weight", _transposed),
    "mlp.c_fc.weight": _only("ffn_up.weight", _transposed),
    "mlp.c_proj.weight": _only("ffn_down.weight", _transposed),
}


def _windows(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}


def _two_ropes(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    return _windows(config) | {
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _latent(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        **({"expert_gating_func": 2} if config.model_type == "deepseek_v3" else {}),
    }


def _ssm(config: Any, name: str = "mamba_d_head") -> dict[str, Any]:
    return {"ssm.inner_size": getattr(config, name) * _first(config, _FIELDS["ssm.time_step_rank"])}


def _key_heads(config: Any, kinds: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": [config.num_key_value_heads * ("attention" in str(kind)) for kind in kinds]}


def _gemma3n(config: Any) -> dict[str, Any]:
    normal = torch.distributions.Normal(0.0, 1.0)
    return _two_ropes(config) | {
        "altup.num_inputs": config.altup_num_inputs,
        "altup.active_idx": config.altup_active_idx,
        "feed_forward_length": list(config.intermediate_size),
        "final_logit_softcapping": config.final_logit_softcapping,
        "activation_sparsity_scale": [
            float(normal.icdf(torch.tensor(share))) for share in config.activation_sparsity_pattern
        ],
    }


def _full_layer(config: Any) -> dict[str, Any]:
    """The settings of the layers of Gemma 4 with full attention."""
    return next(iter(config.to_dict()["per_layer_config"].values()))


def _gemma4(config: Any) -> dict[str, Any]:
    full = _full_layer(config)
    return _two_ropes(config) | {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": _get(config, "head_dim"),
        "attention.value_length_swa": _get(config, "head_dim"),
        "rope.dimension_count": full["head_dim"],
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    return {
        **_key_heads(config, ["attention" * (kind == "full_attention") for kind in config.layers_block_type]),
        **_ssm(config, "mamba_head_dim"),
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.head_dim,
    }


def _hybrid_heads(config: Any) -> dict[str, Any]:
    return _key_heads(config, ["attention" * (kind == "full_attention") for kind in config.layer_types])


def _jamba(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    kinds = ["attention" * (i % config.attn_layer_period == config.attn_layer_offset) for i in layers]
    return _key_heads(config, kinds) | {"ssm.inner_size": config.mamba_expand * config.hidden_size}


def _next(config: Any) -> dict[str, Any]:
    return {"ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads}


_NEXT: dict[str, Any] = {"fields": _next, "norms_plus_one": True}
# By model_type in transformers.
WRITTEN: dict[str, Written] = {
    "mixtral": Written(name="llama", permuted=True),
    "qwen2_moe": Written(name="qwen2moe"),
    "qwen3_moe": Written(name="qwen3moe"),
    "olmoe": Written(name="olmoe"),
    "granitemoe": Written(name="granitemoe", permuted=True),
    "granitemoeshared": Written(name="granitemoe", permuted=True),
    "gpt_oss": Written(
        name="gpt-oss",
        fields=lambda config: {"expert_feed_forward_length": config.intermediate_size},
        changes=_ALTERNATING,
    ),
    "glm4_moe": Written(name="glm4moe"),
    "deepseek_v2": Written(name="deepseek2", fields=_latent),
    "deepseek_v3": Written(name="deepseek2", fields=_latent),
    "llama4_text": Written(
        name="llama4",
        fields=lambda config: {
            "feed_forward_length": config.intermediate_size_mlp,
            "expert_feed_forward_length": config.intermediate_size,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
        },
        changes=_TRANSPOSED_EXPERTS,
    ),
    "ernie4_5_moe": Written(name="ernie4_5-moe"),
    "dots1": Written(name="dots1"),
    "exaone_moe": Written(name="exaone-moe", fields=_windows),
    "afmoe": Written(name="afmoe"),
    "minimax_m2": Written(
        name="minimax-m2", fields=lambda config: {"expert_feed_forward_length": config.intermediate_size}
    ),
    "hunyuan_v1_moe": Written(name="hunyuan-moe"),
    "mellum": Written(name="mellum", fields=_two_ropes),
    "phi": Written(name="phi2", fields=lambda config: {"feed_forward_length": 4 * config.hidden_size}),
    "gemma3n_text": Written(name="gemma3n", fields=_gemma3n, changes=_ALTUP),
    "gemma4_text": Written(
        name="gemma4",
        fields=_gemma4,
        changes={"layer_scalar": lambda config, weight: {"layer_output_scale.weight": weight}},
    ),
    "glm4": Written(name="glm4"),
    "glm": Written(name="chatglm"),
    "ministral3": Written(
        name="mistral3",
        fields=lambda config: {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rope_parameters["factor"],
            "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        },
        permuted=True,
    ),
    "olmo": Written(name="olmo", fields=lambda config: {"attention.clamp_kqv": config.clip_qkv}, permuted=True),
    "olmo3": Written(name="olmo2", fields=_two_ropes),
    "exaone4": Written(name="exaone4", fields=_windows),
    "starcoder2": Written(name="starcoder2"),
    "stablelm": Written(name="stablelm"),
    "granite_swa": Written(
        name="granite_swa",
        fields=lambda config: (
            _windows(config) | {"attention.rope_pattern": [theta > 0 for theta in config.layer_rope_theta]}
        ),
        changes={"self_attn.sinks": lambda config, weight: {"attn_sinks.weight": weight}},
        permuted=True,
    ),
    "falcon": Written(name="falcon", changes={"query_key_value.weight": _falcon}),
    "bloom": Written(
        name="bloom", changes={f"query_key_value.{end}": _grouped(f"attn_qkv.{end}") for end in ("weight", "bias")}
    ),
    "gpt2": Written(name="gpt2", changes=_GPT2),
    "gpt_neox": Written(
        name="gptneox",
        fields=lambda config: {"use_parallel_residual": config.use_parallel_residual},
        changes={f"query_key_value.{end}": _grouped(f"attn_qkv.{end}") for end in ("weight", "bias")},
    ),
    "nemotron": Written(
        name="nemotron", fields=lambda config: {"attention.layer_norm_epsilon": config.norm_eps}, norms_plus_one=True
    ),
    "cohere": Written(name="command-r"),
    "cohere2": Written(name="cohere2", fields=_windows),
    "hunyuan_v1_dense": Written(name="hunyuan-dense"),
    "seed_oss": Written(name="seed_oss"),
    "arcee": Written(name="arcee", permuted=True),
    "apertus": Written(name="apertus"),
    "ernie4_5": Written(name="ernie4_5"),
    "qwen3_next": Written(name="qwen3next", changes=_LINEAR, **_NEXT),
    "qwen3_5_text": Written(name="qwen35", changes=_TILED, **_NEXT),
    "qwen3_5_moe_text": Written(name="qwen35moe", changes=_TILED, **_NEXT),
    "lfm2": Written(
        name="lfm2",
        fields=lambda config: {**_hybrid_heads(config), "attention.layer_norm_rms_epsilon": config.norm_eps},
        changes={"conv.conv.weight": _only("shortconv.conv.weight", lambda config, weight: weight.squeeze(1))},
    ),
    "mamba": Written(name="mamba", fields=lambda config: {"ssm.inner_size": config.intermediate_size}, changes=_STATE),
    "falcon_mamba": Written(
        name="mamba",
        fields=lambda config: {"ssm.inner_size": config.intermediate_size, "ssm.dt_b_c_rms": True},
        changes=_STATE,
    ),
    "mamba2": Written(
        name="mamba2",
        fields=lambda config: {
            "ssm.inner_size": config.head_dim * config.num_heads,
            "ssm.time_step_rank": config.num_heads,
        },
        changes=_STATE2,
    ),
    "falcon_h1": Written(
        name="falcon-h1",
        fields=lambda config: {"ssm.inner_size": config.mamba_d_ssm},
        changes=_STATE2 | {"pre_ff_layernorm.weight": lambda config, weight: {"ffn_norm": weight}},
    ),
    "nemotron_h": Written(name="nemotron_h_moe", fields=_nemotron_h, changes=_STATE2),
    "granitemoehybrid": Written(
        name="granitehybrid",
        fields=lambda config: {
            **_hybrid_heads(config),
            **_ssm(config),
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        },
        changes=_STATE2,
        permuted=True,
    ),
    "jamba": Written(name="jamba", fields=_jamba, changes=_STATE),
}
WRITTEN["lfm2_moe"] = Written(name="lfm2moe", fields=WRITTEN["lfm2"].fields, changes=WRITTEN["lfm2"].changes)


_STACKS = {
    r"altup_projections\.\d": "altup_proj",
    r"altup_unembed_projections\.\d": "altup_unembd_proj",
    r"layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms": r"blk.\1.attn_\2_norm",
    r"act_fn\.(\w+)": r"xielu.\1",
}
# Settings that files do not store: those of the published models, or none.
_SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layers": None, "layer_types": None},
    "afmoe": {"layer_types": None},
    "starcoder2": {"sliding_window": None},
    "granite_swa": {"layer_rope_theta": [10000.0, 0, 10000.0, 10000.0]},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "falcon": {"bias": False, "num_kv_heads": 1},
    "dots1": {"layer_types": None},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "gemma3n_text": {"altup_num_inputs": 4},
    "mellum": {"norm_topk_prob": True},
}


def writable_model(name: str, **settings: Any) -> Any:
    """A random model of one of `WRITTEN` whose settings are all in its file. Each weight has an effect."""
    plain = EVERY[name]()
    settings = _SETTINGS.get(name, {}) | {"bos_token_id": None, "eos_token_id": None} | settings
    config = type(plain)(**plain.to_dict() | settings)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if weight.dim() <= 1 and not key.endswith("A_log"):
                weight += 0.1 * torch.randn(weight.shape)
    return model


def write_architecture(
    path: Path, model: Any, kind: str = "F32", *, module: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write a model of one of `WRITTEN`. Experts and matrices of whole blocks have a type, such as Q8_0.

    `module` has the tensors of a last block, which predicts further tokens, by their names in it.
    """
    config = model.config.get_text_config(decoder=True)
    written = WRITTEN[config.model_type]
    writer = gguf.GGUFWriter(path, written.name)
    fields = _common(config) | dict(written.fields(config))
    if module:
        fields |= {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    for name, value in fields.items():
        _add_field(writer, f"{written.name}.{name}", value)
    add_tokenizer(writer, "default")
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architectures.get(written.name.removesuffix("_swa"), gguf.MODEL_ARCH.QWEN3MOE), config.num_hidden_layers
    )
    stacks: dict[str, list[torch.Tensor]] = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (stack := _stack(key)) is not None:
            stacks.setdefault(stack, []).append(weight)
            continue
        for name, values in _tensors(config, written, names, key, weight.float()):
            add_values(writer, name, values.contiguous().numpy(), kind if _blocked(name, values) else "F32")
    for name, weight in (module or {}).items():
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}", weight.numpy())
    for name, parts in stacks.items():
        if name.startswith("xielu"):
            writer.add_array(f"{written.name}.{name}", [float(part) for part in parts])
        else:
            writer.add_tensor(f"{name}.weight", torch.stack(parts).numpy())
    if written.name == "gemma4":
        size = _full_layer(config)["head_dim"] // 2
        turned = int(size * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (size - turned), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _stack(key: str) -> str | None:
    """The name of the tensor or field that a weight is a part of."""
    matches = ((re.search(pattern, key), name) for pattern, name in _STACKS.items())
    return next((match.expand(name) for match, name in matches if match), None)


def _blocked(name: str, values: torch.Tensor) -> bool:
    """Whether llama.cpp quantizes a tensor."""
    exact = ("ssm_a", "ssm_d", "conv", "ffn_gate_inp", "norm", "exps.bias", "altup", "layer_output_scale")
    return values.dim() > 1 and values.shape[-1] % 32 == 0 and not any(part in name for part in exact)


def _get(config: Any, name: str) -> Any:
    """A setting, or None. Some settings differ between layers, and transformers does not return them."""
    settings = config.to_dict()
    return settings[name] if name in settings else getattr(config, name, None)


def _first(config: Any, names: str) -> Any:
    """The first of the settings that a configuration has."""
    values = (_get(config, name) for name in names.split())
    return next((value for value in values if value is not None), None)


def _common(config: Any) -> dict[str, Any]:
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 1 << 20),
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "n_inner", None)
        or getattr(config, "ffn_hidden_size", None)
        or getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": getattr(config, "num_attention_heads", 0),
    }
    if config.model_type in ("mamba", "mamba2", "falcon_mamba"):
        fields |= {"feed_forward_length": 0, "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon}
    elif (epsilon := getattr(config, "layer_norm_epsilon", None)) is not None:
        fields["attention.layer_norm_epsilon"] = epsilon
    if heads := fields["attention.head_count"]:
        keys = _first(config, "num_kv_heads num_key_value_heads")
        fields["attention.head_count_kv"] = keys if config.model_type != "bloom" else heads
        size = _get(config, "head_dim") or config.hidden_size // heads
        fields |= {"attention.key_length": size, "attention.value_length": size}
        rope = getattr(config, "rope_parameters", None) or {}
        if (share := rope.get("partial_rotary_factor")) is not None:
            fields["rope.dimension_count"] = int(size * share)
        if (theta := rope.get("rope_theta")) is not None:
            fields["rope.freq_base"] = theta
    for name, settings in _FIELDS.items():
        if (value := _first(config, settings)) is not None and not (name == "embedding_scale" and value == 1):
            fields.setdefault(name, value)
    return {name: value for name, value in fields.items() if value is not None}


def _add_field(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value if math.isfinite(value) else 0.0)
    else:
        writer.add_uint32(name, value)


def _tensors(config: Any, written: Written, names: Any, key: str, weight: torch.Tensor) -> Tensors:
    """Yield the tensors of a weight. `names` are those of the package gguf."""
    if (layer := re.match(r"(?:\w+\.)?(?:layers|h)\.(\d+)\.(.+)", key)) is not None:
        number, part = layer.groups()
        for end, change in (_EXPERTS | dict(written.changes)).items():
            if part.endswith(end) and (end != "experts.up_proj" or "shared" not in part):
                yield from ((f"blk.{number}.{name}", values) for name, values in change(config, weight).items())
                return
        if part.endswith(("e_score_correction_bias", "expert_bias")):
            yield f"blk.{number}.exp_probs_b.bias", weight
            return
    module, _, suffix = key.rpartition(".")
    # Some names in checkpoints are not those of the modules.
    aliases = (module, module.replace("model.", "backbone.", 1), module.removeprefix("transformer."), f"{module}.layer")
    tensor = next(filter(None, map(names.get_name, aliases)), "output")
    if written.permuted and tensor.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if tensor.endswith("attn_q") else config.num_key_value_heads
        weight = weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    is_norm = tensor.endswith("norm") and not tensor.endswith("ssm_norm") and suffix == "weight"
    yield f"{tensor}.{suffix}", weight + (written.norms_plus_one and is_norm)
