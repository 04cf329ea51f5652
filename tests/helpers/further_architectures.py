"""Attention models beyond the common ones, for the table of architectures."""

from collections.abc import Callable, Mapping

from transformers import PreTrainedConfig

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

_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DENSE_FIRST = {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)}
_SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
_LATENT_HEADS = {"num_key_value_heads": 4, **LATENT}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in zip(MIXED, (1e4, 1e5), strict=False)}
# An indexer that chooses a part of the keys. Several heads make equal scores of two keys unlikely.
_INDEXED = {"index_topk": WINDOW, "index_head_dim": 16, "index_n_heads": 8, **_LATENT_HEADS, **_ROUTED}
_SHARED_INDEX = {"indexer_types": ["full", "shared"] * (LAYERS // 2)}


def _dbrx() -> PreTrainedConfig:
    return make_config(
        "DbrxConfig",
        d_model=32,
        n_heads=4,
        n_layers=LAYERS,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        num_key_value_heads=...,
        **NO_NAMES,
    )


FURTHER: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "apertus": config_of("ApertusConfig"),
    "cohere2_moe": config_of(
        "Cohere2MoeConfig", head_dim=8, num_shared_experts=1, num_experts=4, num_experts_per_tok=2, **_SLIDING
    ),
    "deepseek_v2": config_of(
        "DeepseekV2Config", first_k_dense_replace=1, n_shared_experts=1, **_ROUTED, **_LATENT_HEADS
    ),
    "ernie4_5": config_of("Ernie4_5Config", head_dim=8),
    "ernie4_5_moe": config_of(
        "Ernie4_5_MoeConfig", moe_intermediate_size=24, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1
    ),
    "gemma4": text_within(
        "Gemma4Config",
        config_of(
            "Gemma4TextConfig",
            head_dim=8,
            global_head_dim=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            pad_token_id=0,
            **_SLIDING,
        ),
    ),
    "gemma4_unified": text_within(
        "Gemma4UnifiedConfig", config_of("Gemma4UnifiedTextConfig", head_dim=8, pad_token_id=0, **_SLIDING)
    ),
    "glm": config_of("GlmConfig", head_dim=8),
    "glm4_moe": config_of(
        "Glm4MoeConfig", use_qk_norm=True, first_k_dense_replace=1, n_shared_experts=1, head_dim=8, **_ROUTED
    ),
    "glm4_moe_lite": config_of("Glm4MoeLiteConfig", **_DENSE_FIRST, **_ROUTED, **_LATENT_HEADS),
    "hunyuan_v1_dense": config_of("HunYuanDenseV1Config", head_dim=8),
    "llama4": text_within(
        "Llama4Config",
        config_of(
            "Llama4TextConfig",
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            attn_temperature_tuning=False,
        ),
    ),
    "longcat_flash": config_of(  # two attention modules in a layer
        "LongcatFlashConfig",
        num_layers=LAYERS,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        num_hidden_layers=...,
        intermediate_size=...,
        head_dim=8,
        **_LATENT_HEADS,
    ),
    "mimo_v2_flash": config_of("MiMoV2FlashConfig", head_dim=12, v_head_dim=8, **_DENSE_FIRST, **_SLIDING, **_ROUTED),
    "minimax_m2": config_of("MiniMaxM2Config", head_dim=8, rotary_dim=4, **_LOCAL),
    "ministral3": config_of(
        "Ministral3Config",
        head_dim=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "olmo": config_of("OlmoConfig", clip_qkv=2.0),
    "seed_oss": config_of("SeedOssConfig", head_dim=8),
    "afmoe": config_of(
        "AfmoeConfig", head_dim=8, num_shared_experts=1, num_dense_layers=1, mup_enabled=True, **_SLIDING, **EXPERTS
    ),
    "apertus1p5_text": config_of("Apertus1p5TextConfig"),
    "arcee": config_of("ArceeConfig"),
    "aria_text": config_of("AriaTextConfig", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "axk1": config_of("AXK1Config", **_DENSE_FIRST, **_ROUTED, **_LATENT_HEADS),
    "beam": config_of("BeamConfig", head_dim=8, n_group=1, topk_group=1, **_DENSE_FIRST, **_SLIDING, **EXPERTS),
    "bitnet": config_of("BitNetConfig"),
    "codegen": gpt_config_of("CodeGenConfig", rotary_dim=4),
    "cohere_compass_text": config_of("CohereCompassTextConfig", head_dim=8, rope_parameters=_ROPES, **_SLIDING),
    "ctrl": gpt_config_of("CTRLConfig", dff=48),
    "cwm": config_of("CwmConfig", head_dim=8, bos_token_id=0, rope_parameters=_ROPE, **_SLIDING),
    "dbrx": _dbrx,
    "dots1": config_of("Dots1Config", first_k_dense_replace=1, n_shared_experts=1, **_SLIDING, **_ROUTED),
    "dory": config_of("DoryConfig", head_dim=8, n_input_layers=1, n_output_layers=1),  # two layers run twice
    "exaone": config_of("ExaoneConfig"),
    "exaone_moe": config_of("ExaoneMoeConfig", num_shared_experts=1, **_SLIDING, **EXPERTS),
    "flex_olmo": config_of("FlexOlmoConfig", num_experts=4, num_experts_per_tok=2),
    "flint": config_of(
        "FlintConfig", head_dim=8, shared_expert_intermediate_size=24, mlp_only_layers=[0], **_SLIDING, **EXPERTS
    ),
    "gemma4_unified_text": config_of("Gemma4UnifiedTextConfig", head_dim=8, **_SLIDING),
    "granite_swa": config_of("GraniteSWAConfig", attention_multiplier=0.2, **_SLIDING),
    "granitemoe_swa": config_of(
        "GraniteMoeSWAConfig", attention_multiplier=0.2, shared_intermediate_size=24, **_SLIDING, **_LOCAL
    ),
    "granitemoeshared": config_of(
        "GraniteMoeSharedConfig", attention_multiplier=0.2, shared_intermediate_size=24, **_LOCAL
    ),
    "helium": config_of("HeliumConfig", head_dim=8),
    "hunyuan_v1_moe": config_of("HunYuanMoEV1Config", head_dim=8, num_experts=4, moe_topk=2),
    "hy_v3": config_of("HYV3Config", head_dim=8, num_shared_experts=1, **_DENSE_FIRST, **EXPERTS),
    "hyperclovax": config_of("HyperCLOVAXConfig", attention_multiplier=0.2),
    "internlm3": config_of("InternLM3Config"),
    "iquestcoder": config_of("IQuestCoderConfig"),
    "jais2": config_of("Jais2Config"),
    "jetmoe": config_of("JetMoeConfig", kv_channels=8, num_attention_heads=..., **_LOCAL),
    "kolibri1": config_of("Kolibri1Config", head_dim=8, shared_expert_intermediate_size=24, **_SLIDING, **EXPERTS),
    "laguna": config_of(
        "LagunaConfig",
        head_dim=8,
        shared_expert_intermediate_size=24,
        num_attention_heads_per_layer=[4, 2, 4, 2],
        **_DENSE_FIRST,
        **_SLIDING,
        **EXPERTS,
    ),
    "mellum": config_of(
        "MellumConfig", head_dim=8, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **_SLIDING
    ),
    "minicpm3": config_of("MiniCPM3Config", **_LATENT_HEADS),
    "minimax_m3_vl_text": config_of(
        "MiniMaxM3VLTextConfig",
        head_dim=8,
        rotary_dim=4,
        dense_intermediate_size=48,
        shared_intermediate_size=24,
        **_DENSE_FIRST,
        **_LOCAL,
    ),
    "ministral": config_of("MinistralConfig", head_dim=8, **_SLIDING),
    "mllama": text_within(  # without an image, the layer with cross-attention is skipped
        "MllamaConfig",
        config_of(
            "MllamaTextConfig",
            cross_attention_layers=[1],
            rope_parameters=_ROPE,
            bos_token_id=0,
            eos_token_id=...,
            pad_token_id=0,
        ),
        vision_config={
            **dict.fromkeys(("hidden_size", "intermediate_size", "vision_output_dim"), 16),
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 28,
            "intermediate_layers_indices": [],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    ),
    "nanochat": config_of("NanoChatConfig"),
    "persimmon": config_of("PersimmonConfig", num_key_value_heads=...),
    "phi4_multimodal": config_of(
        "Phi4MultimodalConfig",
        pad_token_id=0,
        sliding_window=WINDOW,
        vision_config={**_TOWER, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
        audio_config={**_TOWER, "num_blocks": 1, "nemo_conv_channels": 16, "input_size": 16},
    ),
    "sarvam_mla": config_of(
        "SarvamMLAConfig",
        first_k_dense_replace=1,
        n_shared_experts=1,
        **_ROUTED,
        **_LATENT_HEADS | {"q_lora_rank": None},
    ),
    "sarvam_moe": config_of("SarvamMoEConfig", head_dim=8, first_k_dense_replace=1, n_shared_experts=1, **_ROUTED),
    "solar_open": config_of("SolarOpenConfig", head_dim=8, n_shared_experts=1, intermediate_size=..., **_ROUTED),
    "vaultgemma": config_of(
        "VaultGemmaConfig", head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=3.0, **_SLIDING
    ),
    "axk2": config_of("AXK2Config", gated_norm_rank=16, **_DENSE_FIRST, **_INDEXED),
    "deepseek_v32": config_of("DeepseekV32Config", **_DENSE_FIRST, **_INDEXED),
    "dots3_note_text": config_of("Dots3NoteTextConfig", **_INDEXED),
    "glm_moe_dsa": config_of("GlmMoeDsaConfig", **_DENSE_FIRST, **_INDEXED, **_SHARED_INDEX),
    "hy_v4": config_of("HYV4Config", **_DENSE_FIRST, **_INDEXED, **_SHARED_INDEX),
    "gpt_neo": config_of(
        "GPTNeoConfig",
        num_layers=LAYERS,
        num_heads=4,
        attention_types=[[["global", "local"], LAYERS // 2]],
        window_size=WINDOW,
        num_hidden_layers=...,
        num_attention_heads=...,
        num_key_value_heads=...,
    ),
    "mistral_large4": text_within(
        "MistralLarge4Config",
        config_of(
            "MistralLarge4TextConfig",
            kv_source_layers=[0, 0, 2, 2],
            no_rope_layers=[1] * LAYERS,
            rope_parameters=_ROPE,
            **_DENSE_FIRST,
            **_INDEXED | {"q_lora_rank": ...},
        ),
        vision_config={**_TOWER, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
    ),
    "youtu": config_of("YoutuConfig", **_LATENT_HEADS),
}
