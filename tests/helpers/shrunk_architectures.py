"""Models that read images or sound with small sizes in place of their defaults, for the table of architectures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.helpers.configs import LAYERS, VOCAB, WINDOW

_COMMON = {"num_key_value_heads": 2, "head_dim": 16}
_TEXT = _COMMON | {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "sliding_window": WINDOW,
}
_TOWER = _COMMON | {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model", "width", "mlp_dim"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layer", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "heads", "attention_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "output_dim", "projection_dim"), 64),
    "image_size": 28,
    "patch_size": 14,
    "max_source_positions": 50,
}
_SECTIONS = {"mrope_section": [4, 2, 2]}
_NAMES = """
    aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni exaone4_5 fuyu glm46v glm_ocr glmasr glmga got_ocr2
    granite_docling hyperclovax_vision_v2 idefics2 lighton_ocr llava_next llava_next_video llava_onevision minimax_m3_vl
    moss_transcribe_diarize omniasr paddleocr_vl pp_chart2table qianfan_ocr qwen3_asr video_llama_3 video_llava
    vipllava voxtral
"""
_RECURRENT_NAMES = "lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7"


def _small(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a text model or of another part, with small sizes."""
    changed = {}
    for key, value in settings.items():
        if key in sizes and value is not None:
            changed[key] = sizes[key]
        elif key == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
            changed[key] = value | _SECTIONS
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            changed[key] = value[: sizes["num_hidden_layers"]]
        elif str(key).endswith("token_id"):  # labels have numbers
            changed[key] = 0 if key == "pad_token_id" else None
        else:
            changed[key] = _small(value, sizes) if isinstance(value, dict) else value
    return changed | ({"initializer_range": 0.3} if "vocab_size" in settings else {})


def _shrunk(model_type: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    changed: dict[str, Any] = {"tie_word_embeddings": False}
    for key, value in default.to_dict().items():
        part = getattr(default, key, None)
        if isinstance(part, PreTrainedConfig):
            changed[key] = _small(value, _TEXT if part is text else _TOWER)
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int):
            changed[key] = None if key in ("bos_token_id", "eos_token_id") else VOCAB - 1
        elif text is default:
            changed |= _small({key: value}, _TEXT)
        elif key not in ("model_type", "architectures", "transformers_version", "tie_word_embeddings"):
            changed[key] = value
    for key in ("model_type", "architectures", "transformers_version"):
        changed.pop(key, None)
    return config_class(**changed | {"tie_word_embeddings": False})


def _configs(names: str) -> Mapping[str, Callable[[], PreTrainedConfig]]:
    return {name: partial(_shrunk, name) for name in names.split()}


SHRUNK = _configs(_NAMES)
SHRUNK_RECURRENT = _configs(_RECURRENT_NAMES)
