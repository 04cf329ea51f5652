"""The configuration that is read without transformers equals that of transformers."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from outrider.models.loader.model_config import DEFAULTS, make_model_config, read_native_config
from outrider.models.loader.weight_shapes import weight_shapes
from outrider.models.native.dimensions import Dimensions

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
EQUAL_HEADS = ("olmoe", "qwen2_5_vl_text", "qwen2_vl_text")  # whose heads share the hidden size
FACTORS = {"short_factor": [1.5] * 8, "long_factor": [2.5] * 8}
ROPES = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with factors": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
        "beta_fast": 8,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "longrope": {"type": "longrope", **FACTORS},
}
# Settings beside `SIZES`, by a name and the model type.
CASES = {
    **{(name, name): {"rope_theta": 5000.0, **HEADS} for name in DEFAULTS},
    **{(name, name): {"rope_theta": 5000.0, "num_key_value_heads": 2} for name in EQUAL_HEADS},
    ("layers with one MLP", "qwen3_moe"): {
        "rope_theta": 1e4,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        **HEADS,
    },
    ("positions of images", "qwen2_vl_text"): {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "use_sliding_window": True,
        "max_window_layers": 3,
        "num_key_value_heads": 2,
    },
    **{(f"llama {kind}", "llama"): {"rope_theta": 5000.0, "rope_scaling": rope} for kind, rope in ROPES.items()},
    ("rope_parameters", "qwen3"): {"rope_parameters": ROPES["yarn"] | {"rope_theta": 1e6}, **HEADS},
    ("phi3 longrope", "phi3"): {
        "rope_theta": 1e4,
        "rope_scaling": ROPES["longrope"],
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": 2,
    },
    ("phi3 partial", "phi3"): {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **HEADS},
    ("gemma3 scaling", "gemma3_text"): {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 3,
        **HEADS,
    },
    ("window", "qwen2"): {"rope_theta": 1e4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ("smollm3 window", "smollm3"): {"rope_theta": 1e4, "use_sliding_window": True, "sliding_window": 8, **HEADS},
    ("own head size", "llama"): {"rope_theta": 1e4, "attention_bias": True},
    ("granite scales", "granite"): {"rope_theta": 1e4, "attention_multiplier": 0.3, "logits_scaling": 2.0, **HEADS},
}


def _settings(case):
    _, model_type = case
    settings = {"model_type": model_type, "torch_dtype": "bfloat16", **SIZES, **CASES[case]}
    if model_type == "gemma3_text":
        settings.setdefault("rope_local_base_freq", 1e4)
    return settings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_dimensions_and_weights_equal_those_of_transformers(case):
    settings = _settings(case)
    light = make_model_config(settings)
    assert light is not None
    full = _text_config(settings)
    assert light.dtype == full.dtype == torch.bfloat16
    for name in ("vocab_size", "tie_word_embeddings", "eos_token_id", "rope_parameters", "max_position_embeddings"):
        ours = getattr(light, name)
        theirs = getattr(full, name, ours)  # parts of multimodal models lack some
        if name == "rope_parameters":  # transformers keeps old names beside the new ones
            ours, theirs = (json.loads(json.dumps(each)) for each in (ours, theirs))
            ours = _common(ours, theirs)
            theirs = _common(theirs, ours)
        assert ours == theirs
    with torch.device("meta"):
        text = AutoModel.from_config(full)
    expected = {f"model.{name}": tuple(weight.shape) for name, weight in text.state_dict().items()}
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert weight_shapes(light) == expected
    ours, theirs = Dimensions.of(light), Dimensions.of(full)
    _check_rotary(ours.rotary, full, text)
    attention = text.layers[0].self_attn
    assert (ours.dim, ours.scale) == (attention.head_dim, attention.scaling)
    table_scale = getattr(text.embed_tokens, "scalar_embed_scale", 1.0)
    assert ours.table_scale == pytest.approx(table_scale, rel=1e-7)
    for name in ("windows", "gelu", "score_cap", "logit_cap", "epsilon", "residual_scale", "logit_divisor", "routing"):
        assert getattr(ours, name) == getattr(theirs, name)


def _text_config(settings):
    return CONFIG_MAPPING[settings["model_type"]].from_dict(json.loads(json.dumps(settings)))


def _common(one, other):
    """Return the entries of nested settings that both have."""
    if not isinstance(one, dict):
        return one
    return {name: _common(value, other[name]) for name, value in one.items() if name in other}


def _check_rotary(rotary, config, text):
    """Compare the frequencies with those of the module of transformers, in all bits."""
    module = type(text.rotary_emb)(config)
    kinds = sorted(set(config.layer_types)) if hasattr(module, "sliding_attention_inv_freq") else [""]
    for i, kind in enumerate(kinds):
        prefix = f"{kind}_" if kind else ""
        assert torch.equal(rotary.frequency[i], getattr(module, f"{prefix}inv_freq").float())
        assert rotary.scale[i] == torch.tensor(getattr(module, f"{prefix}attention_scaling"))
    assert len(rotary.frequency) == len(kinds)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"model_type": "bert"},
        {"model_type": ["llama"]},
        {"hidden_act": "relu"},
        {"rope_theta": 0.0},
        {"rope_theta": None},
        {"rope_scaling": "linear"},
        {"num_attention_heads": 5, "head_dim": None},
        {"rms_norm_eps": None},
    ],
)
def test_unusual_configurations_are_left_to_transformers(tmp_path, change):
    settings = _settings(("own head size", "llama"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    assert read_native_config(tmp_path) is not None
    file.write_text(json.dumps(settings | change))
    assert read_native_config(tmp_path) is None
