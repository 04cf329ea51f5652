"""Models of every architecture, small and random, and a tokenizer of single bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from outrider.load import load_checkpoint
from outrider.params import SamplingParams
from outrider.target import Target, make_target
from outrider.testing import random_tree
from outrider.types import Batch, Draft, Request, Round, Row

VOCAB = 256
WINDOW = 8  # of every layer that has one, so that it bites
LAYERS = 4

Weights = Mapping[str, torch.Tensor]


def _config(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """A small configuration of transformers' class `name`; a setting of None is left to the class."""
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
    return lambda: getattr(transformers, name)(**common | settings)


def _gpt(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """The same for a class that still speaks as GPT-2 did."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 128, "vocab_size": VOCAB}
    rest = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return lambda: getattr(transformers, name)(**sizes | rest | settings)


def _gemma3() -> PreTrainedConfig:
    """A text model inside a larger one; its tower for images has as many layers."""
    text = _config("Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW)().to_dict()
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
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

ARCHITECTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
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
    "olmo2": _config("Olmo2Config"),
    "olmo3": _config("Olmo3Config", sliding_window=WINDOW, layer_types=_MIXED),
    "olmoe": _config("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "starcoder2": _config("Starcoder2Config", sliding_window=WINDOW),
    "smollm3": _config("SmolLM3Config", no_rope_layer_interval=2),
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
        floor_scale=16,
    ),
    "mamba2": _config(
        "Mamba2Config",
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=2,
        chunk_size=WINDOW,
        num_attention_heads=None,
        num_key_value_heads=None,
        max_position_embeddings=None,
        intermediate_size=None,
    ),
}


def save(folder: Path, config: PreTrainedConfig, *, seed: int = 0, size: int = VOCAB) -> Path:
    """Write a random model of a configuration, and a tokenizer of `size` tokens; every weight says something."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms, biases and sinks, which start as ones and zeros
                weight += 0.2 * torch.randn(weight.shape)
    return save_model(folder, model, size=size)


def save_model(folder: Path, model: PreTrainedModel, *, size: int = VOCAB) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer(size).save_pretrained(folder)
    return folder


def tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """One token per byte, and special ones up to `size`."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([f"<{i}>" for i in range(len(letters), size)])
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)
