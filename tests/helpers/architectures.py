"""The table of architectures: those that run and what each supports, and those that are refused.

The tests run it, and docs/generate_models.py writes docs/reference/architectures.md from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig

from outrider.models.native.support import FAMILIES
from tests.helpers.configs import (
    EXPERTS,
    LATENT,
    LAYERS,
    MIXED,
    NO_NAMES,
    VOCAB,
    WINDOW,
    config_of,
    gpt_config_of,
    make_config,
    text_within,
)
from tests.helpers.further_architectures import FURTHER
from tests.helpers.multimodal_architectures import LFM2_VL, MULTIMODAL
from tests.helpers.shrunk_architectures import SHRUNK, SHRUNK_RECURRENT


def gemma3(dim: int = 8) -> PreTrainedConfig:
    """A text model with heads of `dim` inside a larger one; its tower for images has as many layers."""
    text = make_config("Gemma3TextConfig", head_dim=dim, query_pre_attn_scalar=dim, sliding_window=WINDOW).to_dict()
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


_SHARED = {  # the last two layers read the keys of the first two
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": MIXED,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}

_NO_ATTENTION = {"num_attention_heads": ..., "num_key_value_heads": ..., "max_position_embeddings": ...}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": WINDOW}
_NO_CLAMP = 1e-9  # transformers clamps the time step to a minimum in prefill, but not in decoding
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": config_of("LlamaConfig", attention_bias=True),
    "qwen2": config_of("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "qwen3": config_of("Qwen3Config", head_dim=16),
    "mistral": config_of("MistralConfig", sliding_window=WINDOW),
    "gemma": config_of("GemmaConfig", head_dim=8, num_key_value_heads=1),
    "gemma2": config_of("Gemma2Config", head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=3.0),
    "gemma3_text": config_of(
        "Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=MIXED
    ),
    "gemma3": gemma3,
    "gemma3n_text": config_of("Gemma3nTextConfig", altup_num_inputs=2, laurel_rank=4, **_SHARED),
    "gemma4_text": config_of("Gemma4TextConfig", global_head_dim=16, **_SHARED),
    "phi": config_of("PhiConfig"),
    "phi3": config_of("Phi3Config", sliding_window=WINDOW),
    "phimoe": config_of("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "gpt_neox": config_of("GPTNeoXConfig"),
    "gpt2": gpt_config_of("GPT2Config", scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": gpt_config_of("GPTBigCodeConfig"),
    "opt": config_of("OPTConfig", ffn_dim=48, word_embed_proj_dim=32, init_std=0.3, pad_token_id=0),
    "mixtral": config_of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen2_moe": config_of(
        "Qwen2MoeConfig",
        shared_expert_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=MIXED,
        **EXPERTS,
    ),
    "qwen3_moe": config_of("Qwen3MoeConfig", **EXPERTS),
    "cohere": config_of("CohereConfig", use_qk_norm=True),
    "cohere2": config_of("Cohere2Config", head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    "granite": config_of("GraniteConfig", attention_multiplier=0.2, logits_scaling=2.0),
    "granitemoe": config_of("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.2),
    "granitemoehybrid without recurrence": config_of(
        "GraniteMoeHybridConfig",
        num_local_experts=0,
        shared_intermediate_size=48,
        layer_types=["full_attention"] * LAYERS,
        mamba_n_heads=4,
        mamba_d_head=16,
    ),
    "olmo2": config_of("Olmo2Config"),
    "olmo3": config_of("Olmo3Config", sliding_window=WINDOW, layer_types=MIXED),
    "olmoe": config_of("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "starcoder2": config_of("Starcoder2Config", sliding_window=WINDOW),
    "smollm3": config_of("SmolLM3Config", no_rope_layer_interval=2),
    "diffllama": config_of("DiffLlamaConfig"),  # two calls of one attention module in a layer
    "exaone4": config_of("Exaone4Config", sliding_window=WINDOW, sliding_window_pattern=2),
    "glm4": config_of("Glm4Config", head_dim=8),
    "gpt_oss": config_of(
        "GptOssConfig",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v3": config_of(
        "DeepseekV3Config",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **LATENT,
    ),
    "llama4_text": config_of(
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
    "llama4_text without temperature": config_of(
        "Llama4TextConfig",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 0, 1],
        attn_temperature_tuning=False,
    ),
    "llama with dynamic rope": config_of(
        "LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "phi3 with longrope": config_of(
        "Phi3Config",
        hidden_size=64,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0],
            "long_factor": [4.0] * 8,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
        original_max_position_embeddings=64,
    ),
    "bloom": gpt_config_of("BloomConfig", hidden_size=48, n_head=6),
    "mpt": config_of("MptConfig", d_model=48, n_heads=6, n_layers=LAYERS, max_seq_len=128, **NO_NAMES),
    "falcon": config_of("FalconConfig", multi_query=True, bias=True),
    "falcon with grouped queries": config_of("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
    "falcon with alibi": config_of("FalconConfig", alibi=True, multi_query=False, bias=True, parallel_attn=False),
    "falcon with alibi and one key head": config_of("FalconConfig", alibi=True, multi_query=True),
    "stablelm": config_of("StableLmConfig", qk_layernorm=True, use_qkv_bias=True),
    "nemotron": config_of("NemotronConfig"),
    "doge": config_of("DogeConfig", pad_token_id=0),
}
if transformers.GPTJForCausalLM._supports_attention_backend:  # not before transformers 5.24
    _ATTENTION["gptj"] = gpt_config_of("GPTJConfig", rotary_dim=4)

ATTENTION: Mapping[str, Callable[[], PreTrainedConfig]] = {**_ATTENTION, **FURTHER, **MULTIMODAL, **SHRUNK}

RECURRENT: Mapping[str, Callable[[], PreTrainedConfig]] = {  # alone, or beside attention layers
    "mamba": config_of("MambaConfig", state_size=8, time_step_rank=4, **_NO_ATTENTION, intermediate_size=64),
    "falcon_mamba": config_of(
        "FalconMambaConfig", state_size=8, time_step_rank=4, **_NO_ATTENTION, intermediate_size=64
    ),
    "mamba2": config_of(
        "Mamba2Config",
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=2,
        chunk_size=WINDOW,
        intermediate_size=...,
        **_NO_ATTENTION,
    ),
    "bamba": config_of("BambaConfig", attn_layer_indices=[1, 3], **_MAMBA2),
    "jamba": config_of(
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
    "falcon_h1": config_of("FalconH1Config", mamba_d_ssm=64, head_dim=8, **_MAMBA2),
    "granitemoehybrid": config_of(
        "GraniteMoeHybridConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention"] * (LAYERS // 2),
        **_MAMBA2,
    ),
    "nemotron_h": config_of(
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
    "zamba": config_of(  # the weights of one attention module in two layers
        "ZambaConfig",
        layers_block_type=["linear_attention", "hybrid"] * (LAYERS // 2),
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        pad_token_id=0,
    ),
    "zamba2": config_of(  # one attention module for two layers
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
    "qwen3_next": config_of(
        "Qwen3NextConfig", layer_types=_LINEAR, shared_expert_intermediate_size=24, **EXPERTS, **_DELTA
    ),
    "qwen3_5_text": config_of("Qwen3_5TextConfig", layer_types=_LINEAR, **_DELTA),
    "lara_mini": config_of(
        "LaraMiniConfig",
        layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        shared_expert_intermediate_size=24,
        sliding_window=WINDOW,
        **EXPERTS,
        **_DELTA,
    ),
    "qwen3_5_moe_text": config_of(
        "Qwen3_5MoeTextConfig", layer_types=_LINEAR, shared_expert_intermediate_size=24, **EXPERTS, **_DELTA
    ),
    "qwen3_5": text_within("Qwen3_5Config", config_of("Qwen3_5TextConfig", layer_types=_LINEAR, **_DELTA)),
    "qwen3_5_moe": text_within(
        "Qwen3_5MoeConfig",
        config_of("Qwen3_5MoeTextConfig", layer_types=_LINEAR, shared_expert_intermediate_size=24, **EXPERTS, **_DELTA),
    ),
    "olmo_hybrid": config_of(
        "OlmoHybridConfig", layer_types=_LINEAR, **_DELTA | {"linear_num_key_heads": 4, "head_dim": ...}
    ),
    "bailing_hybrid": config_of(
        "BailingHybridConfig",
        head_dim=8,
        layer_types=_LINEAR,
        num_key_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **LATENT,
    ),
    "kimi_linear": config_of(
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
        **LATENT | {"q_lora_rank": None, "v_head_dim": 8},
    ),
    "lfm2": config_of("Lfm2Config", layer_types=["conv", "full_attention"] * (LAYERS // 2), conv_L_cache=3),
    "lfm2_vl": LFM2_VL,
    **SHRUNK_RECURRENT,
    "lfm2_moe": config_of(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention"] * (LAYERS // 2),
        conv_L_cache=3,
        num_dense_layers=1,
        **EXPERTS,
    ),
    "lfm3": config_of(
        "Lfm3Config",
        head_dim=8,
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        conv_L_cache=3,
        sliding_window=WINDOW,
    ),
    "minimax": config_of(
        "MiniMaxConfig", layer_types=_LINEAR, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=WINDOW
    ),
    "zaya": config_of(
        "ZayaConfig",
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=24,
        router_hidden_size=16,
        sliding_window=WINDOW,
        layer_types=["hybrid_sliding", "hybrid"] * (LAYERS // 2),
        cca_time0=3,
        attention_bias=True,
    ),
    "recurrent_gemma": config_of(
        "RecurrentGemmaConfig",
        lru_width=32,
        head_dim=8,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
    ),
    "rwkv": config_of("RwkvConfig", attention_hidden_size=32, context_length=128, **_NO_ATTENTION),
}
ARCHITECTURES = {**ATTENTION, **RECURRENT}


def _seq2seq(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """A configuration whose encoder has another number of layers than its decoder."""
    ids = {"bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": 0, "decoder_start_token_id": 0}
    return lambda: getattr(transformers, name)(**{"vocab_size": VOCAB, **ids, **settings})


def _t5gemma() -> PreTrainedConfig:
    """Sliding windows, soft caps, and an encoder of another width."""
    stack = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": MIXED}
    stack |= {"attn_logit_softcapping": 3.0, "eos_token_id": VOCAB - 1, "pad_token_id": 0}
    decoder = make_config("T5GemmaModuleConfig", **stack).to_dict()
    stack["layer_types"] = MIXED[:2]
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
    "m2m_100": _seq2seq("M2M100Config", pad_token_id=1, **_BART),  # 0 begins texts
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
    )
}
EVERY = {**ARCHITECTURES, **ENCODER_DECODER, **SPEECH}

# What `--quantize` leaves out on torch.
_ONLY_LM_HEAD = frozenset({"gpt2"})  # its other layers are no linear layers of torch
_WITHOUT_EXPERTS = frozenset(
    {
        "afmoe",
        "aria",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "beam",
        "cohere2_moe",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "dots3_note_text",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm_moe_dsa",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "jamba",
        "jetmoe",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lara_mini",
        "lfm2_moe",
        "llama4",
        "llama4_text",
        "llama4_text without temperature",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "mistral_large4",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe",
        "sarvam_mla",
        "sarvam_moe",
        "solar_open",
        "zaya",
    }
)
# Passes of decoder-only models that cannot be recorded as CUDA graphs.
_NO_GRAPHS = frozenset(
    {
        "granitemoehybrid without recurrence",  # transformers reads values of tensors in the pass
        "dbrx",  # the same
        "longcat_flash",  # a layer has two attention modules
        "llama with dynamic rope",  # the same
        # Layers share modules, or have no index.
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "zamba2",
        "mllama",  # a layer is skipped, so its memory is never allocated
        # Their attention layers or indexers are replaced.
        "axk2",
        "bloom",
        "deepseek_v32",
        "doge",
        "dots3_note_text",
        "falcon",
        "falcon with alibi",
        "falcon with alibi and one key head",
        "falcon with grouped queries",
        "gpt_neo",
        "glm_moe_dsa",
        "hy_v4",
        "llama4_text",
        "mistral_large4",
        "mpt",
        "nemotron",
        "stablelm",
    }
)


# The fast tests run one or two architectures for each mechanism of a pass. Only the slow tests run the others.
FAST = frozenset(
    {
        "llama",
        "gemma3",  # a text model in a larger one
        "gpt2",  # learned positions
        "gptj",  # rotary positions in pairs
        "llama with dynamic rope",
        "phi3 with longrope",
        "smollm3",  # layers without positions
        "qwen2",  # windows in some layers
        "gemma2",  # soft caps
        "gpt_oss",  # sinks
        "deepseek_v3",  # latent attention, and experts
        "mixtral",
        "diffllama",  # two calls of one attention module in a layer
        "longcat_flash",  # two attention modules in a layer
        "gemma3n_text",  # keys of earlier layers
        "granitemoehybrid without recurrence",
        # Their attention layers or indexers are replaced.
        "bloom",
        "deepseek_v32",
        "doge",
        "falcon",
        "falcon with alibi",
        "gpt_neo",
        "llama4_text",
        "mpt",
        "nemotron",
        "stablelm",
        # Recurrent layers, by their class.
        "mamba",
        "mamba2",
        "bamba",
        "falcon_h1",
        "zamba",
        "zamba2",
        "qwen3_next",
        "olmo_hybrid",
        "bailing_hybrid",
        "minimax",
        "lfm2",
        "zaya",
        "recurrent_gemma",
        "rwkv",
        # Encoder-decoder models.
        "t5",
        "bart",
        "t5gemma",
        "whisper",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an architecture supports. Chains, trees and batches are tested for all of them."""

    config: Callable[[], PreTrainedConfig]  # a small one
    kind: str  # attention, recurrent (alone or beside attention), encoder-decoder or speech
    quantized: str  # by `--quantize` on torch: yes, without experts, without LM head, LM head only, or no
    prefixes: bool  # whether requests share the cache of a common prefix
    graphs: bool  # whether passes can be recorded as CUDA graphs

    @property
    def native(self) -> bool:
        """Whether the native kernels run it, which the code declares."""
        return self.kind == "attention" and self.config().get_text_config(decoder=True).model_type in FAMILIES


_WITH_ENCODER = ("encoder-decoder", "speech")


def _architecture(name: str, kind: str, config: Callable[[], PreTrainedConfig]) -> Architecture:
    quantized = "LM head only" if name in _ONLY_LM_HEAD else "yes"
    if name in _WITHOUT_EXPERTS:
        quantized = "without experts"
    if name in ("dory", "hy_v4"):  # which normalize the weights of the LM head in each pass, or keep it in float32
        quantized = "without LM head"
    return Architecture(
        config=config,
        kind=kind,
        quantized="no" if kind in _WITH_ENCODER else quantized,
        prefixes=kind not in _WITH_ENCODER,
        graphs=kind not in _WITH_ENCODER and name not in _NO_GRAPHS,
    )


_KINDS = {"attention": ATTENTION, "recurrent": RECURRENT, "encoder-decoder": ENCODER_DECODER, "speech": SPEECH}
TABLE: Mapping[str, Architecture] = {
    name: _architecture(name, kind, config) for kind, configs in _KINDS.items() for name, config in configs.items()
}

# Models with code of their own, which the newest transformers does not have.
NOT_IN_TRANSFORMERS = ("baichuan", "chatglm", "internlm2", "minicpm", "openelm", "plamo2", "qwen", "rwkv7", "xverse")

_UNREPLACED, _LAYERS = "cannot replace its attention", "layers of type .* are not supported yet"
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {  # a config.json, and the reason
    "xglm": ({}, _UNREPLACED),
    "qwen4_exp_text": ({}, _LAYERS),
    "moshi": ({}, "use different windows"),
    "led": ({}, "of encoder-decoder models only bart, .* are supported"),
    "bert": ({}, "not a causal language model"),
    "longt5": ({}, "of encoder-decoder models only bart, .* are supported"),
}
REFUSED_BY_CHECK: Mapping[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bert-generation": (config_of("BertGenerationConfig", is_decoder=False), "differ from the model's own"),
    "modernbert-decoder": (
        config_of(
            "ModernBertDecoderConfig",
            num_key_value_heads=...,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"), 0),
        ),
        f"it has no list of {LAYERS} decoder layers",  # its `decoder` is the output layer
    ),
    "hrm_text": (
        config_of("HrmTextConfig", head_dim=8, num_key_value_heads=...),
        "it has no list of 32 decoder layers",  # but two lists, which run in turns
    ),
}
