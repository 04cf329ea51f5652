"""The architectures of GGUF files whose layers have attention and one MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

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
    layer_types,
    module,
    renamed,
)

if TYPE_CHECKING:
    from outrider.models.loader.gguf.file import GGUFFile

# Layers with a norm of the output of attention, too.
_POST_NORMS = renamed(
    LAYER,
    post_attention_layernorm="post_attention_norm",
    pre_feedforward_layernorm="ffn_norm",
    post_feedforward_layernorm="post_ffw_norm",
)
_FUSED_MLP = renamed(LAYER, mlp__gate_up_proj="ffn_up", mlp__gate_proj=None, mlp__up_proj=None)
_PLAIN_MLP = renamed(ATTENTION, mlp__up_proj="ffn_up", mlp__down_proj="ffn_down")
_LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": "attention.layer_norm_epsilon"}
_GPT_NORM = {"rms_norm_eps": None, "layer_norm_epsilon": "attention.layer_norm_epsilon"}
SCALES = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}
_SHARED_INPUTS: Layout = {  # of Gemma's embeddings for each layer
    "per_layer_input_gate": module("inp_gate"),
    "per_layer_projection": module("proj"),
    "post_per_layer_input_norm": module("post_norm"),
}
_SHARED_KEYS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")  # of layers that read those of others
_SHARED_TOP: Layout = {
    **TOP,
    "model.embed_tokens_per_layer": module("per_layer_token_embd"),
    "model.per_layer_model_projection": module("per_layer_model_proj"),
    "model.per_layer_projection_norm": module("per_layer_proj_norm"),
}
HUNYUAN = renamed(
    LAYER,
    self_attn__q_norm=None,
    self_attn__k_norm=None,
    self_attn__query_layernorm="attn_q_norm",
    self_attn__key_layernorm="attn_k_norm",
)
_MOST_HEADS = 64  # of StableLM
_GEMMA_27B_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})


def has(file: GGUFFile, tensor: str) -> bool:
    """Return whether the first layer, or a later one, has a tensor."""
    return any(f"blk.{i}.{tensor}" in file.tensors for i in range(file.size("block_count")))


def biases(file: GGUFFile, common: Settings) -> Settings:
    """Return which layers have biases."""
    return {"attention_bias": has(file, "attn_q.bias"), "mlp_bias": has(file, "ffn_up.bias")}


def attention_scale(file: GGUFFile, common: Settings) -> Settings:
    """Return the factor of attention scores of Granite models."""
    return {"attention_multiplier": file.size("attention.scale", common["head_dim"] ** -0.5)}


def _phi3(file: GGUFFile, common: Settings) -> Settings:
    rope = common["rope_parameters"]
    original = file.size("rope.scaling.original_context_length", common["max_position_embeddings"])
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": file.floats("rope_factors_long.weight"),
            "short_factor": file.floats("rope_factors_short.weight"),
            "attention_factor": file.size("rope.scaling.attn_factor", 1.0),
        }
    return {"original_max_position_embeddings": original}


def _gemma2(file: GGUFFile, common: Settings) -> Settings:
    return _gemma_scale(file, common) | {
        "sliding_window": file.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.size("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.size("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFFile, common: Settings) -> Settings:
    return _gemma_scale(file, common) | windows(6, two_ropes=True)(file, common)


def windows(period: int, *, two_ropes: bool = False) -> Callable[[GGUFFile, Settings], Settings]:
    """Return the function that reads the sliding windows of layers. Each `period`-th layer has no window.

    With `two_ropes`, layers with and without a window have rotary embeddings of their own.
    """

    def read(file: GGUFFile, common: Settings) -> Settings:
        settings: Settings = {
            "sliding_window": file.size("attention.sliding_window", 0) or None,
            "final_logit_softcapping": file.size("final_logit_softcapping", 0.0) or None,
            "layer_types": layer_types(file, common["num_hidden_layers"], period),
        }
        if two_ropes:
            full = common["rope_parameters"]
            default = 10000.0 if file.architecture.startswith("gemma") else full["rope_theta"]
            local = {"rope_type": "default", "rope_theta": file.size("rope.freq_base_swa", default)}
            settings["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        return settings

    return read


def _gemma_scale(file: GGUFFile, common: Settings) -> Settings:
    """Return what scales the attention scores. llama.cpp knows the models with 27B parameters by their layers."""
    if common["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        return {"query_pre_attn_scalar": common["hidden_size"] // common["num_attention_heads"]}
    return {"query_pre_attn_scalar": common["head_dim"]}


def _gemma3n(file: GGUFFile, common: Settings) -> Settings:
    scales = torch.tensor(file.size("activation_sparsity_scale"))
    shares = torch.special.ndtr(scales)  # of a normal distribution
    lengths = common["intermediate_size"]
    return windows(5, two_ropes=True)(file, common) | {
        "activation_sparsity_pattern": [round(share, 6) for share in shares.tolist()],
        "intermediate_size": lengths if isinstance(lengths, list) else [lengths] * common["num_hidden_layers"],
        "vocab_size_per_layer_input": common["vocab_size"],
        "laurel_rank": file.tensors["blk.0.laurel_l.weight"].shape[0],
    }


def _gemma4(file: GGUFFile, common: Settings) -> Settings:
    settings = windows(6, two_ropes=True)(file, common)
    types = settings["layer_types"]
    unrotated = file.floats("rope_freqs.weight")
    factor = sum(value < 2 for value in unrotated) / len(unrotated)
    ropes = settings["rope_parameters"]
    ropes["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": factor}
    heads = file.size("attention.head_count_kv")
    wide = file.size("attention.key_length")
    full = types.index("full_attention")
    lengths = common["intermediate_size"]
    experts = file.size("expert_count", 0)
    settings |= {
        "head_dim": file.size("attention.key_length_swa", wide),
        "global_head_dim": wide,
        "use_double_wide_mlp": isinstance(lengths, list) and len(set(lengths)) > 1,
        "intermediate_size": lengths[0] if isinstance(lengths, list) else lengths,
        "num_key_value_heads": heads,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors and has(file, "attn_v.weight"),
        "vocab_size_per_layer_input": common["vocab_size"],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": file.size("expert_used_count", 0) or None,
        "moe_intermediate_size": file.size("expert_feed_forward_length", 0) or None,
    }
    if isinstance(heads, list):
        settings["num_key_value_heads"] = heads[types.index("sliding_attention")]
        settings["num_global_key_value_heads"] = heads[full]
    return settings


def _olmo2(file: GGUFFile, common: Settings) -> Settings:
    if not file.size("attention.sliding_window", 0):
        return {}
    return windows(4, two_ropes=True)(file, common) | {"model_type": "olmo3"}


def _mistral3(file: GGUFFile, common: Settings) -> Settings:
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn":
        scale = file.size("rope.scaling.yarn_log_multiplier", 0.0)
        if scale:
            rope |= {"mscale": scale, "mscale_all_dim": scale, "attention_factor": None}
        rope["llama_4_scaling_beta"] = file.size("attention.temperature_scale", 0.0)
    return {}


def _granite_swa(file: GGUFFile, common: Settings) -> Settings:
    layers = common["num_hidden_layers"]
    theta = common["rope_parameters"]["rope_theta"]
    rotated = file.size("attention.rope_pattern", [True] * layers)
    return (
        biases(file, common)
        | attention_scale(file, common)
        | {
            "sliding_window": file.size("attention.sliding_window"),
            "layer_types": layer_types(file, layers, 4),
            "layer_rope_theta": [theta if each else 0 for each in rotated],
        }
    )


def _stablelm(file: GGUFFile, common: Settings) -> Settings:
    return {
        "qk_layernorm": has(file, "attn_q_norm.weight"),
        "use_qkv_bias": has(file, "attn_q.bias"),
        "use_parallel_residual": not has(file, "ffn_norm.weight"),
    }


def _falcon_rows(config: Any, rows: int) -> torch.Tensor:
    """Return the rows of queries, keys and values, which transformers has together for each key head."""
    keys = config.num_kv_heads
    queries = config.num_attention_heads // keys
    numbers = torch.arange(rows)
    parts = torch.split(numbers, [rows * each // (queries + 2) for each in (queries, 1, 1)])
    grouped = [part.view(keys, -1) for part in parts]
    return torch.cat(grouped, 1).flatten()


def _falcon(file: GGUFFile, common: Settings) -> Settings:
    new = has(file, "attn_norm_2.weight")
    return {
        "new_decoder_architecture": new or common["num_key_value_heads"] > 1,
        "num_ln_in_parallel_attn": 2 if new else 1,
        "num_kv_heads": common["num_key_value_heads"],
        "multi_query": True,
        "bias": False,
        "ffn_hidden_size": file.size("feed_forward_length"),
    }


def _interleaved_rows(config: Any, rows: int) -> torch.Tensor:
    """Return the rows of queries, keys and values, which transformers has together for each head."""
    return torch.arange(rows).view(3, config.num_attention_heads, -1).transpose(0, 1).flatten()


def _transposed(_config: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight.T if weight.dim() > 1 else weight


def _unstacked(at: int) -> Any:
    return lambda _config, stack: stack[at]


def _altup(name: str, tensor: str) -> Layout:
    return {f"{name}.{i}.weight": Source((f"{tensor}.weight",), _unstacked(i)) for i in range(3)}


_PHI_LAYER: Layout = {
    **renamed(ATTENTION, self_attn__o_proj=None, post_attention_layernorm=None),
    "self_attn.dense": module("attn_output"),
    "mlp.fc1": module("ffn_up"),
    "mlp.fc2": module("ffn_down"),
}
_GEMMA3N_LAYER: Layout = {
    **_POST_NORMS,
    **_SHARED_INPUTS,
    "laurel.linear_left": module("laurel_l"),
    "laurel.linear_right": module("laurel_r"),
    "laurel.post_laurel_norm": module("laurel_post_norm"),
    "altup.correct_output_scale": Source(("altup_correct_scale.weight",)),
    "altup.correction_coefs": module("altup_correct_coef"),
    "altup.prediction_coefs": module("altup_predict_coef"),
    "altup.modality_router": module("altup_router"),
    "altup.router_norm": module("altup_router_norm"),
}
_GEMMA4_LAYER: Layout = {
    **_POST_NORMS,
    **_SHARED_INPUTS,
    "layer_scalar": Source(("layer_output_scale.weight",)),
    "post_feedforward_layernorm_1": module("post_ffw_norm_1"),
    "post_feedforward_layernorm_2": module("post_ffw_norm_2"),
    "pre_feedforward_layernorm_2": module("pre_ffw_norm_2"),
    "router.proj": module("ffn_gate_inp"),
    "router.scale": Source(("ffn_gate_inp.scale",)),
    "router.per_expert_scale": Source(("ffn_down_exps.scale",)),
    "experts.gate_up_proj": (experts("ffn_gate_up_exps"), experts("ffn_gate_exps", "ffn_up_exps")),
    "experts.down_proj": experts("ffn_down_exps"),
}


def _head_norms(part: str) -> Layout:
    """Return the norms of queries or keys, which files have in one tensor and transformers for each head."""
    return {
        f"self_attn.{part}_layernorm.norms.{i}.weight": Source((f"attn_{part}_norm.weight",), _unstacked(i))
        for i in range(_MOST_HEADS)
    }


_STABLELM_LAYER: Layout = {
    **renamed(LAYER, self_attn__q_norm=None, self_attn__k_norm=None),
    **_head_norms("q"),
    **_head_norms("k"),
}
_FALCON_LAYER: Layout = {
    "self_attention.query_key_value": module("attn_qkv", rows=_falcon_rows),
    "self_attention.dense": module("attn_output"),
    "mlp.dense_h_to_4h": module("ffn_up"),
    "mlp.dense_4h_to_h": module("ffn_down"),
    "input_layernorm": module("attn_norm"),
    "ln_mlp": module("attn_norm"),
    "ln_attn": module("attn_norm_2"),
}
_FALCON_TOP: Layout = {
    "transformer.word_embeddings": module("token_embd"),
    "transformer.ln_f": module("output_norm"),
    "lm_head": module("output"),
}
DENSE: Mapping[str, Architecture] = MappingProxyType(
    {
        "mistral": Architecture(model_type="mistral", layer={**LAYER, **PERMUTED}),
        "mistral3": Architecture(model_type="ministral3", layer={**LAYER, **PERMUTED}, settings=_mistral3),
        "qwen2": Architecture(model_type="qwen2"),
        "qwen3": Architecture(model_type="qwen3"),
        "phi2": Architecture(
            model_type="phi",
            fields=_LAYER_NORM,
            partial_rotary=True,
            layer=_PHI_LAYER,
            settings=lambda file, common: {"intermediate_size": file.tensors["blk.0.ffn_up.weight"].shape[0]},
            top=renamed(TOP, model__norm=None, model__final_layernorm="output_norm"),
        ),
        "phi3": Architecture(
            model_type="phi3",
            layer=renamed(_FUSED_MLP, self_attn__qkv_proj="attn_qkv"),
            settings=_phi3,
            partial_rotary=True,
        ),
        "gemma": Architecture(model_type="gemma", norms_plus_one=True),
        "gemma2": Architecture(model_type="gemma2", layer=_POST_NORMS, norms_plus_one=True, settings=_gemma2),
        "gemma3": Architecture(model_type="gemma3_text", layer=_POST_NORMS, norms_plus_one=True, settings=_gemma3),
        "gemma3n": Architecture(
            model_type="gemma3n_text",
            fields={
                "altup_num_inputs": "altup.num_inputs",
                "altup_active_idx": "altup.active_idx",
                "hidden_size_per_layer_input": "embedding_length_per_layer_input",
                "num_kv_shared_layers": "attention.shared_kv_layers",
            },
            layer=_GEMMA3N_LAYER,
            spare=_SHARED_KEYS,
            top={
                **_SHARED_TOP,
                **_altup("model.altup_projections", "altup_proj"),
                **_altup("model.altup_unembed_projections", "altup_unembd_proj"),
            },
            settings=_gemma3n,
        ),
        "gemma4": Architecture(
            model_type="gemma4_text",
            fields={
                "hidden_size_per_layer_input": "embedding_length_per_layer_input",
                "num_kv_shared_layers": "attention.shared_kv_layers",
            },
            layer=_GEMMA4_LAYER,
            spare=_SHARED_KEYS,
            top=_SHARED_TOP,
            settings=_gemma4,
        ),
        "granite": Architecture(
            model_type="granite",
            fields=SCALES,
            layer={**LAYER, **PERMUTED},
            settings=lambda file, common: biases(file, common) | attention_scale(file, common),
        ),
        "granite_swa": Architecture(
            model_type="granite_swa",
            fields=SCALES,
            layer={**LAYER, **PERMUTED, "self_attn.sinks": Source(("attn_sinks.weight",))},
            settings=_granite_swa,
        ),
        "glm4": Architecture(
            model_type="glm4",
            layer=renamed(
                _FUSED_MLP, post_self_attn_layernorm="post_attention_norm", post_mlp_layernorm="post_ffw_norm"
            ),
            partial_rotary=True,
            settings=biases,
        ),
        "chatglm": Architecture(model_type="glm", layer=_FUSED_MLP, partial_rotary=True, settings=biases),
        "olmo": Architecture(
            model_type="olmo",
            fields={"rms_norm_eps": None, "clip_qkv": ("attention.clamp_kqv", 0.0)},
            layer={**LAYER, **PERMUTED},
        ),
        "olmo2": Architecture(
            model_type="olmo2", layer=renamed(_POST_NORMS, pre_feedforward_layernorm=None), settings=_olmo2
        ),
        "exaone4": Architecture(
            model_type="exaone4", layer=renamed(_POST_NORMS, pre_feedforward_layernorm=None), settings=windows(4)
        ),
        "starcoder2": Architecture(
            model_type="starcoder2",
            fields={"rms_norm_eps": None, "norm_epsilon": "attention.layer_norm_epsilon"},
            constants={"use_bias": True, "sliding_window": None},
            layer={**ATTENTION, "mlp.c_fc": module("ffn_up"), "mlp.c_proj": module("ffn_down")},
        ),
        "stablelm": Architecture(
            model_type="stablelm", fields=_LAYER_NORM, partial_rotary=True, layer=_STABLELM_LAYER, settings=_stablelm
        ),
        "falcon": Architecture(
            model_type="falcon",
            fields=_GPT_NORM | {"head_dim": None, "intermediate_size": None},
            layers="transformer.h",
            layer=_FALCON_LAYER,
            top=_FALCON_TOP,
            settings=_falcon,
        ),
        "bloom": Architecture(
            model_type="bloom",
            fields=_GPT_NORM | {"head_dim": None, "intermediate_size": None},
            layers="transformer.h",
            layer={
                **_FALCON_LAYER,
                "self_attention.query_key_value": module("attn_qkv", rows=_interleaved_rows),
                "post_attention_layernorm": module("ffn_norm"),
            },
            top={**_FALCON_TOP, "transformer.word_embeddings_layernorm": module("token_embd_norm")},
        ),
        "gpt2": Architecture(
            model_type="gpt2",
            fields=_GPT_NORM | {"head_dim": None, "intermediate_size": None, "n_inner": "feed_forward_length"},
            layers="transformer.h",
            layer={
                "attn.c_attn": module("attn_qkv", make=_transposed),
                "attn.c_proj": module("attn_output", make=_transposed),
                "mlp.c_fc": module("ffn_up", make=_transposed),
                "mlp.c_proj": module("ffn_down", make=_transposed),
                "ln_1": module("attn_norm"),
                "ln_2": module("ffn_norm"),
            },
            top={
                "transformer.wte": module("token_embd"),
                "transformer.wpe": module("position_embd"),
                "transformer.ln_f": module("output_norm"),
                "lm_head": module("output"),
            },
        ),
        "gptneox": Architecture(
            model_type="gpt_neox",
            fields=_LAYER_NORM | {"use_parallel_residual": "use_parallel_residual", "head_dim": None},
            partial_rotary=True,
            layers="gpt_neox.layers",
            layer={
                "attention.query_key_value": module("attn_qkv", rows=_interleaved_rows),
                "attention.dense": module("attn_output"),
                "mlp.dense_h_to_4h": module("ffn_up"),
                "mlp.dense_4h_to_h": module("ffn_down"),
                "input_layernorm": module("attn_norm"),
                "post_attention_layernorm": module("ffn_norm"),
            },
            top={
                "gpt_neox.embed_in": module("token_embd"),
                "gpt_neox.final_layer_norm": module("output_norm"),
                "lm_head": module("output"),
            },
        ),
        "nemotron": Architecture(
            model_type="nemotron",
            fields={"rms_norm_eps": None, "norm_eps": "attention.layer_norm_epsilon"},
            layer=_PLAIN_MLP,
            norms_plus_one=True,
            partial_rotary=True,
        ),
        "command-r": Architecture(
            model_type="cohere",
            fields=_LAYER_NORM | {"logit_scale": "logit_scale"},
            layer=LAYER,
            settings=lambda file, common: {"use_qk_norm": has(file, "attn_q_norm.weight")},
        ),
        "cohere2": Architecture(
            model_type="cohere2", fields=_LAYER_NORM | {"logit_scale": "logit_scale"}, settings=windows(4)
        ),
        "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", layer=HUNYUAN),
        "seed_oss": Architecture(
            model_type="seed_oss",
            layer=renamed(LAYER, post_attention_layernorm="post_attention_norm"),
            settings=lambda file, common: {**biases(file, common), "attention_out_bias": has(file, "attn_output.bias")},
        ),
        "arcee": Architecture(model_type="arcee", layer={**_PLAIN_MLP, **PERMUTED}),
        "apertus": Architecture(
            model_type="apertus",
            layer=renamed(
                _PLAIN_MLP,
                input_layernorm=None,
                post_attention_layernorm=None,
                attention_layernorm="attn_norm",
                feedforward_layernorm="ffn_norm",
            ),
            values={
                "mlp.act_fn.alpha_n": ("xielu.alpha_n", (1,)),
                "mlp.act_fn.alpha_p": ("xielu.alpha_p", (1,)),
                "mlp.act_fn.beta": ("xielu.beta", ()),
                "mlp.act_fn.eps": ("xielu.eps", ()),
            },
        ),
        "ernie4_5": Architecture(
            model_type="ernie4_5", settings=lambda file, common: {"use_bias": has(file, "attn_q.bias")}
        ),
        "smollm3": Architecture(model_type="smollm3", layer={**LAYER, **PERMUTED}),
    }
)
