"""Small configurations of transformers for tests, and settings that several of them share."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import transformers
from transformers import PreTrainedConfig

VOCAB = 256
WINDOW = 8  # of every layer that has one, so that it bites
LAYERS = 4
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
NO_NAMES = {"num_hidden_layers": ..., "num_attention_heads": ..., "hidden_size": ...}


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
    return getattr(transformers, name)(**deepcopy(wanted))  # transformers changes rope_parameters


def config_of(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """The same as `make_config`, made when it is called."""
    return lambda: make_config(name, **settings)


def gpt_config_of(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """The same as `config_of` for a class that names its settings as GPT-2 does."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 128, "vocab_size": VOCAB}
    rest = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return lambda: getattr(transformers, name)(**sizes | rest | settings)


def text_within(name: str, text: Callable[[], PreTrainedConfig], **settings: Any) -> Callable[[], PreTrainedConfig]:
    """The configuration of a larger model of class `name` that contains a text model."""
    return lambda: getattr(transformers, name)(text_config=text().to_dict(), tie_word_embeddings=False, **settings)
