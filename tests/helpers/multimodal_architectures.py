"""Models that read images or sound, of which Outrider runs the text part, for the table of architectures."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from tests.helpers.configs import EXPERTS, LAYERS, WINDOW, config_of, text_within

_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Towers with names of their own for their sizes.
_DEEP = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
}
# Positions of time, height and width rotate parts of a head of 16.
_SECTIONS = {
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_CONV = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "conv_L_cache": 3}


def _with_tower(name: str, text: Callable[[], PreTrainedConfig], **tower: Any) -> Callable[[], PreTrainedConfig]:
    return text_within(name, text, vision_config=tower)


_LLAMA = config_of("LlamaConfig", head_dim=8)
_QWEN2 = config_of("Qwen2Config")

LFM2_VL = _with_tower("Lfm2VlConfig", config_of("Lfm2Config", **_CONV), **_TOWER)  # with recurrent layers
MULTIMODAL: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "glm4v": _with_tower("Glm4vConfig", config_of("Glm4vTextConfig", head_dim=16, **_SECTIONS), **_DEEP),
    "glm4v_moe": _with_tower(
        "Glm4vMoeConfig",
        config_of(
            "Glm4vMoeTextConfig",
            head_dim=32,
            **_SECTIONS,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        **_DEEP,
    ),
    "idefics3": _with_tower("Idefics3Config", _LLAMA, **_TOWER),
    "internvl": _with_tower("InternVLConfig", _QWEN2, **_TOWER),
    "llava": _with_tower("LlavaConfig", _LLAMA, model_type="clip_vision_model", **_TOWER),
    "mistral3": _with_tower(
        "Mistral3Config", config_of("MistralConfig", sliding_window=WINDOW), model_type="pixtral", **_TOWER
    ),
    "qwen2_5_vl": _with_tower("Qwen2_5_VLConfig", config_of("Qwen2_5_VLTextConfig", **_SECTIONS), **_DEEP),
    "qwen2_vl": _with_tower(
        "Qwen2VLConfig", config_of("Qwen2VLTextConfig", **_SECTIONS), depth=2, embed_dim=16, num_heads=2, hidden_size=32
    ),
    "qwen3_vl": _with_tower("Qwen3VLConfig", config_of("Qwen3VLTextConfig", head_dim=16, **_SECTIONS), **_DEEP),
    "qwen3_vl_moe": _with_tower(
        "Qwen3VLMoeConfig", config_of("Qwen3VLMoeTextConfig", head_dim=16, **_SECTIONS, **EXPERTS), **_DEEP
    ),
    "smolvlm": _with_tower("SmolVLMConfig", _LLAMA, **_TOWER),
}
