"""Weights of 8 and 4 bits on torch: their values, and models that use them."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.lab.audit.pair import widen
from outrider.llm import LLM
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch import quantize
from outrider.models.torch.quantize import QuantizedLinear, quantize_model
from tests.helpers import tiny

CPU = torch.device("cpu")
BITS = [8, 4]
MODELS = {
    "gemma2": tiny.ARCHITECTURES["gemma2"](),
    "gpt_neox": tiny.ARCHITECTURES["gpt_neox"](),
    "phi": tiny.make_config("PhiConfig", hidden_size=64, intermediate_size=128),
    "olmo2": tiny.make_config("Olmo2Config", hidden_size=128, intermediate_size=192),
    "tied": tiny.make_config("LlamaConfig", attention_bias=True, tie_word_embeddings=True),
    "mixtral": tiny.ARCHITECTURES["mixtral"](),
    "mamba2": tiny.ARCHITECTURES["mamba2"](),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantize")
    return {name: tiny.save(root / name, config) for name, config in MODELS.items()}


def load(folder):
    return load_checkpoint(folder, dtype="bfloat16", device="cpu")


def load_target(folder, bits):
    """Return a target with weights of `bits` bits, and its checkpoint."""
    checkpoint = load(folder)
    return make_target(checkpoint, slots=4, context=128, kernels="torch", bits=bits), checkpoint


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def score(target, text):
    seq = tiny.admit(target, 0, text)
    with torch.inference_mode():
        logits = target.score(tiny.everything([seq]), tree.empty(1, CPU)).logits
    target.cache.release(0)
    return logits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [32, 96, 192])
def test_layer_multiplies_by_its_quantized_values(bits, bias, inputs):
    weight = random_tensor(80, inputs)
    bias_values = random_tensor(80, seed=1) if bias else None
    layer = QuantizedLinear(weight, bias_values, bits=bits)
    values = layer.values()
    for rows in (0, 1, 3, 4, 5, 8, 9, 20):
        contiguous = random_tensor(1, rows, inputs, seed=rows)
        unaligned = random_tensor(rows * inputs + 1)[1:].view(1, rows, inputs)
        transposed = random_tensor(inputs, rows).T[None]
        for x in (contiguous, unaligned, transposed):
            out = layer(x)
            expected = functional.linear(x.double(), values.double(), bias_values.double() if bias else None)
            atol = 2**-6 * float(expected.abs().max() if rows else 0)
            assert out.shape == (1, rows, 80)
            assert torch.allclose(out.double(), expected, rtol=2**-7, atol=atol)


@pytest.mark.parametrize("bits", BITS)
def test_quantization_error_is_about_half_a_step(bits):
    weight = random_tensor(64, 128) * torch.logspace(-6, 3, 64)[:, None].bfloat16()
    layer = QuantizedLinear(weight, None, bits=bits)
    values = layer.values()
    max_value = (1 << (bits - 1)) - 1
    group = 128 if bits == 8 else 64
    step = weight.float().view(64, -1, group).abs().amax(-1).repeat_interleave(group, 1) / max_value
    # The rounding of the scale adds up to a tenth of a step.
    assert ((values - weight.float()).abs() <= 0.6 * step).all()
    assert torch.equal(layer.weight, values.bfloat16())
    requantized = QuantizedLinear(layer.weight, None, bits=bits)
    if bits == 4:  # bfloat16 represents the values exactly
        assert torch.equal(layer.weight.float(), values)
        assert torch.equal(requantized.values(), values)
    assert layer.nbytes == 64 * 128 * bits // 8 + 2 * 64 * (1 if bits == 8 else 2 * 2)
    layer.load(torch.zeros(64, 128))
    assert not layer.values().any()


@pytest.mark.parametrize(
    ("shape", "supported"), [((48, 64), BITS), ((50, 64), [8]), ((48, 48), [8]), ((48, 40), []), ((1, 32), [8])]
)
def test_shapes_that_the_operators_support(shape, supported):
    assert [bits for bits in BITS if QuantizedLinear.takes(random_tensor(*shape), bits)] == supported
    assert not QuantizedLinear.takes(random_tensor(*shape).float(), 8)
    for bits in supported:
        layer = QuantizedLinear(random_tensor(*shape), None, bits=bits)
        x = random_tensor(3, shape[1], seed=1)
        assert torch.allclose(layer(x).float(), functional.linear(x.float(), layer.values()), rtol=0.02, atol=0.2)


@pytest.mark.fast_cases("gemma2-8", "phi-4", "olmo2-8", "mixtral-4", "mamba2-8")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_target_passes_the_check(name, bits, folders):
    target, checkpoint = load_target(folders[name], bits)
    assert target.kernels == f"torch int{bits}"
    check_target(target, checkpoint)


@pytest.mark.fast_cases("gpt_neox-8", "olmo2-4", "tied-8", "mamba2-4")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "tied", "mamba2"])
def test_quantized_target_equals_its_widened_weights(name, bits, folders):
    text = tiny.text(random.Random(0), 30)
    widened = widen(load(folders[name]), bits)
    assert all(weight.dtype == torch.float32 for weight in widened.model.parameters())
    expected = score(make_target(widened, slots=1, context=64), text)
    logits = score(load_target(folders[name], bits)[0], text)
    unquantized = score(load_target(folders[name], 16)[0], text)
    assert (logits - expected).norm() < 0.08 * expected.norm()  # the rounding of activations remains
    if bits == 4:
        assert (unquantized - expected).norm() > 2 * (logits - expected).norm()


def test_quantized_targets_have_fewer_bytes(folders):
    sizes = [load_target(folders["olmo2"], bits)[0].bytes() for bits in (4, 8, 16)]
    embedding = tiny.VOCAB * 128 * 2
    unquantized = sizes[2] - embedding
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[1] - embedding == pytest.approx(unquantized / 2, rel=0.05)
    head = load_target(folders["olmo2"], 4)[1].model.get_output_embeddings()
    assert head.nbytes == tiny.VOCAB * (128 + 2), "the LM head has 8 bits"


@pytest.mark.fast_cases("False-8", "True-4")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_update_quantizes_the_new_weights(bits, tied, tmp_path):
    config = tiny.make_config("LlamaConfig", attention_bias=True, tie_word_embeddings=tied)
    old, new = (tiny.save(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    text = tiny.text(random.Random(1), 20)
    target, _ = load_target(old, bits)
    new_target, _ = load_target(new, bits)
    before = score(target, text)
    expected = score(new_target, text)
    target.update_weights(load(new).model.state_dict(), 1)
    assert torch.equal(score(target, text), expected)
    target.update_weights(load(old).model.state_dict(), 2)
    assert torch.equal(score(target, text), before)
    with pytest.raises(OutriderError, match="has shape"):
        target.update_weights({"lm_head.weight": torch.zeros(1)}, 3)


def test_warning_names_weights_that_are_not_quantized(folders, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "outrider"):
        load_target(folders["olmo2"], 8)
        assert not caplog.messages
        load_target(folders["tied"], 4)
    (message,) = caplog.messages
    assert message.startswith(
        "llama: 4 weights cannot be quantized and keep their precision: model.layers.0.mlp.down_proj"
    )
    assert message.endswith(", ...")


def test_error_messages_when_quantization_is_unsupported(folders, monkeypatch, tmp_path):
    with pytest.raises(OutriderError, match="quantize needs a CPU and bfloat16, or a GPU with kernels auto"):
        LLM(folders["olmo2"], quantize="int8", dtype="float32", device="cpu", kernels="torch")
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    model = load(tiny.save(tmp_path, tiny.make_config("LlamaConfig", **sizes))).model
    with pytest.raises(UnsupportedModel, match="llama: it has no linear layer that can be quantized"):
        quantize_model(model, 8)
    monkeypatch.setattr(quantize, "OPERATORS", ("_no_such_operator",))
    with pytest.raises(UnsupportedModel, match="this torch has no operator _no_such_operator, which --quantize needs"):
        LLM(folders["olmo2"], quantize="int4", device="cpu", kernels="torch")


def test_quantization_on_a_gpu_needs_the_triton_kernels(folders, monkeypatch):
    def fail(_):
        raise UnsupportedModel("the kernels need another GPU")

    monkeypatch.setattr("outrider.models.triton.support.check_device", fail)
    checkpoint = replace(load(folders["olmo2"]), device=torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match="need another GPU; leave quantize out"):
        make_target(checkpoint, slots=1, context=64, bits=8)
    with pytest.raises(UnsupportedModel, match="quantize on a GPU does not support models with recurrent layers"):
        make_target(replace(checkpoint, recurrent=True), slots=1, context=64, bits=8)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_speculation_with_a_quantized_target(quantize, folders):
    llm = LLM(folders["gemma2"], proposer="ngram", quantize=quantize, device="cpu", max_num_seqs=2, max_model_len=64)
    assert llm.parts.dtype == torch.bfloat16
    assert llm.parts.target.kernels == f"torch {quantize}"
    done = llm.generate([[5, 6, 5, 6, 5], [9, 9, 9]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [len(completion.token_ids) for completion in done] == [12, 12]
