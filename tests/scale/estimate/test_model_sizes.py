"""The sizes of models that `outrider project` computes."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.scale.estimate.models import SIZES, TYPES, Bits, find_model, read_model, typical
from tests.helpers.tiny import ARCHITECTURES, make_config
from tests.scale.estimate.models import BASE, DRAFT


def tiny_config(kind):
    if kind == "deepseek_v2":
        latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
        more = {"first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
        return make_config("DeepseekV2Config", **latent, **experts, **more)
    return ARCHITECTURES[kind]()


@pytest.mark.parametrize("kind", TYPES)
def test_weights_equal_the_matrices_of_transformers(kind, tmp_path):
    config = tiny_config(kind)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    matrices = sum(weights.numel() for weights in reference.parameters() if weights.ndim >= 2)
    model = find_model(str(tmp_path), Bits())
    assert model.held_bytes() / 2 == matrices
    assert model.layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("size", "billions", "active"),
    [
        ("1B", 1.236, 1.236),
        ("7b", 7.616, 7.071),
        ("8B", 8.030, 7.505),
        ("70B", 70.554, 69.503),
        ("405B", 405.853, 403.752),
        ("8x7B", 46.703, 12.749),
        ("30B-A3B", 30.532, 3.042),
        ("671B-A37B", 671.026, 36.625),
    ],
)
def test_sizes_of_published_models(size, billions, active):
    """The published sizes, without norms and biases. `active` does not include the embedding table."""
    model = find_model(size, Bits())
    assert model.held_bytes() / 2e9 == pytest.approx(billions, rel=1e-3)
    assert model.active() / 1e9 == pytest.approx(active, rel=1e-3)


def test_typical_model_is_similar_to_published_models():
    for size in ("8B", "70B"):
        published = find_model(size, Bits())
        estimate = typical(published.held_bytes() / 2, Bits())
        assert estimate.cache_bytes(1) == pytest.approx(published.cache_bytes(1), rel=0.15)
        assert estimate.layers == pytest.approx(published.layers, rel=0.15)
    assert find_model("13B", Bits()).read_bytes(1) == 26e9
    assert find_model("500m", Bits(weights=4)).held_bytes() == 250e6


def test_cache_of_the_measured_pair():
    """docs/explanation/performance.md, Memory: 12 KiB and 1.5 KiB per token."""
    assert (BASE.cache_bytes(1), DRAFT.cache_bytes(1)) == (12 * 1024, 1.5 * 1024)
    assert replace(BASE, cache_bits=8.0).cache_bytes(1) == 6 * 1024


def test_latent_attention_caches_one_latent():
    """DeepSeek-V3 caches 512 + 64 numbers per layer and token, for any number of heads."""
    assert find_model("671B-A37B", Bits()).cache_bytes(1) == 61 * (512 + 64) * 2


def test_sliding_windows_of_configurations():
    settings = dict(SIZES["7B"][1])
    full = read_model(settings, Bits(), name="full").cache_bytes(10000)
    assert read_model({**settings, "sliding_window": 1000}, Bits(), name="off").cache_bytes(10000) == full
    on = {**settings, "sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 14}
    assert read_model(on, Bits(), name="half").cache_bytes(10000) == pytest.approx(full * (0.5 + 0.05))
    mistral = {**settings, "model_type": "mistral", "sliding_window": 1000}
    assert read_model(mistral, Bits(), name="all").cache_bytes(10000) == pytest.approx(full / 10)
    mixed = {**on, "layer_types": ["full_attention"] * 7 + ["sliding_attention"] * 21}
    assert read_model(mixed, Bits(), name="mixed").cache_bytes(10000) == pytest.approx(full * (0.25 + 0.075))
