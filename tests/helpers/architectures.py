"""The table of architectures: those that run and what each supports, and those that are refused.

The tests run it, and docs/generate_models.py writes docs/reference/architectures.md from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig

from outrider.native.support import FAMILIES

VOCAB = 256
WINDOW = 8  # of every layer that has one, so that it bites
LAYERS = 4


def make_config(name: str, **settings: Any) -> PreTrainedConfig:
    """A small configuration of transformers' class `name`; a setting of ... is left out."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    wanted = {key: value for key, value in (common | settings).items() if value is not ...}
    return getattr(transformers, name)(**wanted)


def _config(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: make_config(name, **settings)


def _gpt(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """The same as `_config` for a class that still speaks as GPT-2 did."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 128, "vocab_size": VOCAB}
    rest = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return lambda: getattr(transformers, name)(**sizes | rest | settings)


def _gemma3() -> PreTrainedConfig:
    """A text model inside a larger one; its tower for images has as many layers."""
    text = make_config("Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW).to_dict()
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=tower | {"image_size": 28, "patch_size": 14},
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )


_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_SHARED = {  # the last two layers read the keys of the first two
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": _MIXED,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

_NO_ATTENTION = {"num_attention_heads": ..., "num_key_value_heads": ..., "max_position_embeddings": ...}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": WINDOW,
}
_NO_CLAMP = 1e-9  # transformers clamps the time step to a minimum in prefill, but not in decoding
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_NO_NAMES = {"num_hidden_layers": ..., "num_attention_heads": ..., "hidden_size": ...}

ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig", attention_bias=True),
    "qwen2": _config("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral": _config("MistralConfig", sliding_window=WINDOW),
    "gemma": _config("GemmaConfig", head_dim=8, num_key_value_heads=1),
    "gemma2": _config("Gemma2Config", head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=3.0),
    "gemma3_text": _config(
        "Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "gemma3": _gemma3,
    "gemma3n_text": _config("Gemma3nTextConfig", altup_num_inputs=2, laurel_rank=4, **_SHARED),
    "gemma4_text": _config("Gemma4TextConfig", global_head_dim=16, **_SHARED),
    "phi": _config("PhiConfig"),
    "phi3": _config("Phi3Config", sliding_window=WINDOW),
    "phimoe": _config("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "gpt_neox": _config("GPTNeoXConfig"),
    "gpt2": _gpt("GPT2Config", scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": _gpt("GPTBigCodeConfig"),
    "opt": _config("OPTConfig", ffn_dim=48, word_embed_proj_dim=32, init_std=0.3, pad_token_id=0),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen2_moe": _config(
        "Qwen2MoeConfig",
        shared_expert_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        **_EXPERTS,
    ),
    "qwen3_moe": _config("Qwen3MoeConfig", **_EXPERTS),
    "cohere": _config("CohereConfig", use_qk_norm=True),
    "cohere2": _config("Cohere2Config", head_dim=8, sliding_window=WINDOW, layer_types=_MIXED),
    "granite": _config("GraniteConfig", attention_multiplier=0.2, logits_scaling=2.0),
    "granitemoe": _config("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.2),
    "granitemoehybrid without recurrence": _config(
        "GraniteMoeHybridConfig",
        num_local_experts=0,
        shared_intermediate_size=48,
        layer_types=["full_attention"] * LAYERS,
        mamba_n_heads=4,
        mamba_d_head=16,
    ),
    "olmo2": _config("Olmo2Config"),
    "olmo3": _config("Olmo3Config", sliding_window=WINDOW, layer_types=_MIXED),
    "olmoe": _config("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "starcoder2": _config("Starcoder2Config", sliding_window=WINDOW),
    "smollm3": _config("SmolLM3Config", no_rope_layer_interval=2),
    "diffllama": _config("DiffLlamaConfig"),  # two calls of one attention module in a layer
    "exaone4": _config("Exaone4Config", sliding_window=WINDOW, sliding_window_pattern=2),
    "glm4": _config("Glm4Config", head_dim=8),
    "gpt_oss": _config(
        "GptOssConfig",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **_LATENT,
    ),
    "llama4_text": _config(
        "Llama4TextConfig",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 0, 1],
        attn_temperature_tuning=True,
        floor_scale=4,
    ),
    "llama4_text without temperature": _config(
        "Llama4TextConfig",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 0, 1],
        attn_temperature_tuning=False,
    ),
    "llama with dynamic rope": _config(
        "LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "phi3 with longrope": _config(
        "Phi3Config",
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [4.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
        original_max_position_embeddings=64,
    ),
    "bloom": _gpt("BloomConfig", hidden_size=48, n_head=6),
    "mpt": _config("MptConfig", d_model=48, n_heads=6, n_layers=LAYERS, max_seq_len=128, **_NO_NAMES),
    "falcon": _config("FalconConfig", multi_query=True, bias=True),
    "falcon with grouped queries": _config("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
    "falcon with alibi": _config("FalconConfig", alibi=True, multi_query=False, bias=True, parallel_attn=False),
    "falcon with alibi and one key head": _config("FalconConfig", alibi=True, multi_query=True),
    "stablelm": _config("StableLmConfig", qk_layernorm=True, use_qkv_bias=True),
    "nemotron": _config("NemotronConfig"),
    "doge": _config("DogeConfig", pad_token_id=0),
}
if transformers.GPTJForCausalLM._supports_attention_backend:  # not before transformers 5.24
    ATTENTION["gptj"] = _gpt("GPTJConfig", rotary_dim=4)

RECURRENT: Mapping[str, Callable[[], PreTrainedConfig]] = {  # alone, or beside attention layers
    "mamba": _config("MambaConfig", state_size=8, time_step_rank=4, **_NO_ATTENTION, intermediate_size=64),
    "falcon_mamba": _config("FalconMambaConfig", state_size=8, time_step_rank=4, **_NO_ATTENTION, intermediate_size=64),
    "mamba2": _config(
        "Mamba2Config",
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=2,
        chunk_size=WINDOW,
        intermediate_size=...,
        **_NO_ATTENTION,
    ),
    "bamba": _config("BambaConfig", attn_layer_indices=[1, 3], **_MAMBA2),
    "jamba": _config(
        "JambaConfig",
        mamba_d_state=8,
        mamba_dt_rank=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "falcon_h1": _config("FalconH1Config", mamba_d_ssm=64, head_dim=8, **_MAMBA2),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention"] * (LAYERS // 2),
        **_MAMBA2,
    ),
    "nemotron_h": _config(
        "NemotronHConfig",
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=WINDOW,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
        time_step_min=_NO_CLAMP,
    ),
    "zamba2": _config(  # one attention module for two layers
        "Zamba2Config",
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=8,
        num_mem_blocks=1,
        chunk_size=WINDOW,
        layers_block_type=["mamba", "hybrid"] * (LAYERS // 2),
        use_mem_rope=True,
        num_key_value_heads=4,
        attention_head_dim=16,
        kv_channels=8,
        time_step_min=_NO_CLAMP,
    ),
    "qwen3_next": _config(
        "Qwen3NextConfig", layer_types=_LINEAR, shared_expert_intermediate_size=24, **_EXPERTS, **_DELTA
    ),
    "qwen3_5_text": _config("Qwen3_5TextConfig", layer_types=_LINEAR, **_DELTA),
    "qwen3_5_moe_text": _config(
        "Qwen3_5MoeTextConfig", layer_types=_LINEAR, shared_expert_intermediate_size=24, **_EXPERTS, **_DELTA
    ),
    "olmo_hybrid": _config(
        "OlmoHybridConfig", layer_types=_LINEAR, **_DELTA | {"linear_num_key_heads": 4, "head_dim": ...}
    ),
    "kimi_linear": _config(
        "KimiLinearConfig",
        layer_types=_LINEAR,
        linear_num_heads=4,
        linear_head_dim=8,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **_LATENT | {"q_lora_rank": None, "v_head_dim": 8},
    ),
    "lfm2": _config("Lfm2Config", layer_types=["conv", "full_attention"] * (LAYERS // 2), conv_L_cache=3),
    "lfm2_moe": _config(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention"] * (LAYERS // 2),
        conv_L_cache=3,
        num_dense_layers=1,
        **_EXPERTS,
    ),
    "minimax": _config(
        "MiniMaxConfig", layer_types=_LINEAR, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=WINDOW
    ),
    "recurrent_gemma": _config(
        "RecurrentGemmaConfig",
        lru_width=32,
        head_dim=8,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
    "rwkv": _config("RwkvConfig", attention_hidden_size=32, context_length=128, **_NO_ATTENTION),
}
ARCHITECTURES = {**ATTENTION, **RECURRENT}


def _seq2seq(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """A configuration whose encoder has another number of layers than its decoder."""
    ids = {"bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": 0, "decoder_start_token_id": 0}
    return lambda: getattr(transformers, name)(**{"vocab_size": VOCAB, **ids, **settings})


def _t5gemma() -> PreTrainedConfig:
    """Sliding windows, soft caps, and an encoder of another width."""
    stack = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": _MIXED}
    stack |= {"attn_logit_softcapping": 3.0, "eos_token_id": VOCAB - 1, "pad_token_id": 0}
    decoder = make_config("T5GemmaModuleConfig", **stack).to_dict()
    stack["layer_types"] = _MIXED[:2]
    encoder = make_config("T5GemmaModuleConfig", num_hidden_layers=2, hidden_size=48, **stack).to_dict()
    return transformers.T5GemmaConfig(
        encoder=encoder,
        decoder=decoder,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        eos_token_id=VOCAB - 1,
        pad_token_id=0,
        decoder_start_token_id=0,
        initializer_range=0.3,
    )


_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": LAYERS + 1,  # the cache of transformers needs no fewer than the decoder has
    "num_decoder_layers": LAYERS,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,  # so that all buckets occur
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "init_std": 0.1,
    "tie_word_embeddings": False,
    "forced_eos_token_id": None,
}
ENCODER_DECODER: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "t5": _seq2seq("T5Config", **_T5),
    "flan-t5": _seq2seq("T5Config", **_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _seq2seq("MT5Config", **_T5),
    "bart": _seq2seq("BartConfig", **_BART),
    "t5gemma": _t5gemma,
    "umt5": _seq2seq("UMT5Config", **_T5),
    "mbart": _seq2seq("MBartConfig", **_BART),
    "plbart": _seq2seq("PLBartConfig", **_BART),
    "marian": _seq2seq("MarianConfig", **_BART),
    "pegasus": _seq2seq("PegasusConfig", **_BART),
    "blenderbot": _seq2seq("BlenderbotConfig", **_BART),
    "blenderbot-small": _seq2seq("BlenderbotSmallConfig", **_BART),
}
SPEECH: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "whisper": _seq2seq(
        "WhisperConfig",
        d_model=32,
        num_mel_bins=8,
        max_source_positions=50,  # one second
        max_target_positions=128,
        encoder_layers=2,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        init_std=0.15,
        begin_suppress_tokens=None,
        tie_word_embeddings=False,
    ),
}
EVERY = {**ARCHITECTURES, **ENCODER_DECODER, **SPEECH}

# What `--quantize` leaves out on torch.
_ONLY_LM_HEAD = frozenset({"gpt2"})  # its other layers are no linear layers of torch
_WITHOUT_EXPERTS = frozenset(
    {
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2_moe",
        "llama4_text",
        "llama4_text without temperature",
        "minimax",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
    }
)
# Passes of attention models that cannot be recorded as CUDA graphs.
_NO_GRAPHS = frozenset(
    {
        "granitemoehybrid without recurrence",  # transformers reads values of tensors in the pass
        "llama with dynamic rope",  # the same
        # Their attention layers are replaced.
        "bloom",
        "doge",
        "falcon",
        "falcon with alibi",
        "falcon with alibi and one key head",
        "falcon with grouped queries",
        "llama4_text",
        "mpt",
        "nemotron",
        "stablelm",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an architecture supports. Chains, trees and batches are tested for all of them."""

    config: Callable[[], PreTrainedConfig]  # a small one
    kind: str  # attention, recurrent (alone or beside attention), encoder-decoder or speech
    quantized: str  # by `--quantize` on torch: yes, without experts, LM head only, or no
    prefixes: bool  # whether requests share the cache of a common prefix
    graphs: bool  # whether passes can be recorded as CUDA graphs

    @property
    def native(self) -> bool:
        """Whether the native kernels run it, which the code declares."""
        return self.kind == "attention" and self.config().model_type in FAMILIES


_WITH_ENCODER = ("encoder-decoder", "speech")


def _architecture(name: str, kind: str, config: Callable[[], PreTrainedConfig]) -> Architecture:
    quantized = "LM head only" if name in _ONLY_LM_HEAD else "yes"
    if name in _WITHOUT_EXPERTS:
        quantized = "without experts"
    return Architecture(
        config=config,
        kind=kind,
        quantized="no" if kind in _WITH_ENCODER else quantized,
        prefixes=kind not in _WITH_ENCODER,
        graphs=kind == "attention" and name not in _NO_GRAPHS,
    )


_KINDS = {"attention": ATTENTION, "recurrent": RECURRENT, "encoder-decoder": ENCODER_DECODER, "speech": SPEECH}
TABLE: Mapping[str, Architecture] = {
    name: _architecture(name, kind, config) for kind, configs in _KINDS.items() for name, config in configs.items()
}

# Models with code of their own, which the newest transformers does not have.
NOT_IN_TRANSFORMERS = ("baichuan", "chatglm", "internlm2", "minicpm", "openelm", "plamo2", "qwen", "rwkv7", "xverse")

_UNREPLACED, _LAYERS = "cannot replace its attention", "layers of type .* are not supported yet"
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {  # a config.json, and the reason
    "gpt_neo": ({}, _UNREPLACED),
    "lfm3": ({}, _LAYERS),
    "zamba": ({}, _LAYERS),
    "moshi": ({}, "use different windows"),
    "led": ({}, "of encoder-decoder models only bart, .* are supported"),
    "bert": ({}, "not a causal language model"),
    "longt5": ({}, "of encoder-decoder models only bart, .* are supported"),
}
REFUSED_BY_CHECK: Mapping[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bert-generation": (_config("BertGenerationConfig", is_decoder=False), "differ from the model's own"),
}
