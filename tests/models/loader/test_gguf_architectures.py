"""GGUF files of many architectures: the logits are those of the model that was written."""

import random

import pytest
import torch

from outrider.core import tree
from outrider.errors import UnsupportedModel
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.transformers_checkpoint import load_gguf
from outrider.models.torch.gguf_linear import BlockLinear
from outrider.models.torch.gguf_made import BlockExperts
from tests.helpers import tiny
from tests.helpers.gguf_architectures import WRITTEN, writable_model, write_architecture

_SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.fast_cases(
    "mixtral",
    "qwen3_moe",
    "granitemoeshared",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "afmoe",
    "phi",
    "gemma3n_text",
    "gemma4_text",
    "glm4",
    "falcon",
    "bloom",
    "gpt2",
    "qwen3_next",
    "qwen3_5_text",
    "falcon_mamba",
    "falcon_h1",
    "nemotron_h",
    "jamba",
    "lfm2_moe",
)
@pytest.mark.parametrize("name", list(WRITTEN))
@torch.inference_mode()
def test_logits_are_those_of_the_model_that_was_written(tmp_path, name):
    model = writable_model(name)
    loaded = load_checkpoint(write_architecture(tmp_path / "model.gguf", model), dtype="float32", kernels="torch")
    ids = torch.randint(tiny.VOCAB, (1, 20))
    for each in (model, loaded.model):
        if name not in ("falcon", "bloom"):
            each.set_attn_implementation("eager")
    expected = model(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-4 * float(expected.abs().max()))
    assert loaded.recurrent == (name in tiny.RECURRENT)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
@torch.inference_mode()
def test_experts_stay_in_blocks(tmp_path, name):
    """Those that a token chooses are dequantized when it is computed."""
    model = writable_model(name, **_SIZES)
    loaded = load_checkpoint(write_architecture(tmp_path / "model.gguf", model, "Q8_0"), kernels="torch")
    assert loaded.block_types == ("Q8_0",)
    loaded = loaded.model
    weights = model.state_dict()
    found = {key: module for key, module in loaded.named_modules() if isinstance(module, BlockExperts)}
    assert len(found) == sum(key.endswith("experts.down_proj") for key in weights) * 2
    for key, module in found.items():
        assert torch.allclose(module.blocks.dequantize(), weights[key], atol=0.01)
        module.blocks.dequantize = None  # nothing may expand all experts
    loaded.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    ids = torch.randint(tiny.VOCAB, (1, 6))
    outputs = [each(ids).logits[0] for each in (loaded, model)]
    assert torch.nn.functional.cosine_similarity(*outputs).median() > 0.98  # rounding may change an expert


@pytest.mark.parametrize(
    ("name", "settings", "made"),
    [
        ("deepseek_v3", {"kv_lora_rank": 32, "qk_nope_head_dim": 32}, "self_attn.kv_b_proj"),
        ("qwen3_next", {}, "linear_attn.in_proj_qkvz"),
        ("qwen3_5_text", {}, "linear_attn.out_proj"),
        ("granitemoeshared", {"shared_intermediate_size": 32}, "shared_mlp.input_linear"),
        ("bloom", {"n_head": 4}, "self_attention.query_key_value"),
    ],
)
def test_matrices_with_another_layout_stay_in_blocks(tmp_path, name, settings, made):
    model = writable_model(name, hidden_size=64, **settings)
    loaded = load_checkpoint(write_architecture(tmp_path / "model.gguf", model, "Q8_0"), kernels="torch").model
    weights = model.state_dict()
    found = {key: module for key, module in loaded.named_modules() if isinstance(module, BlockLinear)}
    assert any(key.endswith(made) for key in found)
    for key, module in found.items():
        assert torch.allclose(module.weight, weights[f"{key}.weight"], atol=0.02), key


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@torch.inference_mode()
def test_the_kernels_read_experts_from_the_file(tmp_path, name, kind):
    """Bits are those of the model in transformers that the file is read into."""
    sizes = {key: value for key, value in _SIZES.items() if (name, key) != ("olmoe", "head_dim")}
    path = write_architecture(tmp_path / "model.gguf", writable_model(name, **sizes), kind)
    checkpoint = load_checkpoint(path)
    assert checkpoint.weights is not None
    whole = load_gguf(path, "auto", torch.device("cpu"), "auto")
    logits = []
    for each in (checkpoint, whole):
        target = tiny.make_target(each, slots=2, context=64)
        assert target.kernels == ("native Q8_0" if kind == "Q8_0" else "native")
        seq = tiny.admit(target, 0, tiny.text(random.Random(1), 12))
        logits.append(target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits)
        check_target(target, each)
    assert torch.equal(*logits)


def test_a_tensor_that_the_model_does_not_use_is_named(tmp_path):
    """llama.cpp reads it where it exists, so the model would be another one."""
    model = writable_model("seed_oss")
    model.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.zeros(32))
    path = write_architecture(tmp_path / "model.gguf", model)
    with pytest.raises(UnsupportedModel, match=r"does not use, such as blk\.1\.ffn_down\.bias; use the folder"):
        load_checkpoint(path)
