"""Quantized copies whose scales are fitted to the inputs of the target's layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, DraftBudget, Draw, SequenceState
from outrider.drafting.propose.draft_model.calibrated_copy import calibrated_copy, sample_texts
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native.target import NativeTarget
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def checkpoint():
    return load_checkpoint(embedded("nano"), dtype="float32", device="cpu")


@pytest.fixture
def target(checkpoint):
    return make_target(checkpoint, slots=1, context=96, kernels="native")


def copy_of(target, checkpoint, bits=4, folder=""):
    setup = ProposerSetup(
        target=target,
        vocab=target.vocab,
        slots=1,
        context=96,
        device=target.device,
        dtype=torch.float32,
        draw=Draw.ARGMAX,
        tokenizer=checkpoint.tokenizer,
        target_folder=folder,
    )
    return calibrated_copy(target, bits, setup)


def logits(model, checkpoint):
    """Return the logits [texts, V] after each text."""
    rows = []
    for feed in sample_texts(checkpoint.tokenizer, 40):
        model.cache.release(0)
        model.cache.admit(0, feed[:1])
        batch = Batch(seqs=(SequenceState.of(feed),), start=(0,), feed=(feed,), budget=DraftBudget((0,)))
        rows.append(model.score(batch, tree.empty(1, model.device)).logits[0, 0])
    return torch.stack(rows)


def test_moments_are_the_squares_of_the_inputs_of_the_layers(target, checkpoint):
    texts = sample_texts(checkpoint.tokenizer, 5)
    layers = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}
    expected = {}

    def record(name):
        def hook(_module, inputs):
            expected[name] = expected.get(name, 0) + inputs[0][0, 1:].square().sum(0)

        return hook

    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    for i, layer in enumerate(model.model.layers):
        for part, path in layers.items():
            layer.get_submodule(path).register_forward_pre_hook(record(f"{i}.{part}"))
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text]))
    moments = target.input_moments(texts)
    assert moments.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(moments[name], values, rtol=1e-3, atol=1e-5)


def test_a_calibrated_copy_is_closer_to_the_target(target, checkpoint):
    calibrated, plain = copy_of(target, checkpoint), target.make_requantized(4)
    exact, *near = (logits(model, checkpoint).softmax(-1) for model in (target, calibrated, plain))
    overlap = [torch.minimum(each, exact).sum(-1).mean() for each in near]
    assert overlap[0] > overlap[1] + 0.005
    assert calibrated.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("bits", [8, 4])
def test_without_calibration_the_scales_follow_from_the_range(target, checkpoint, bits, monkeypatch):
    if bits == 4:
        module = "outrider.drafting.propose.draft_model.calibrated_copy"
        monkeypatch.setattr(f"{module}.MOST_OPERATIONS", 0)  # of a large target
    copy, plain = copy_of(target, checkpoint, bits), target.make_requantized(bits)
    assert torch.equal(logits(copy, checkpoint), logits(plain, checkpoint))


def test_moments_are_measured_once_and_kept(target, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.computed.cache_folder", lambda: tmp_path)
    expected = logits(copy_of(target, checkpoint, folder=checkpoint.folder), checkpoint)
    (file,) = tmp_path.glob("moments-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(NativeTarget, "input_moments", None)
        assert torch.equal(logits(copy_of(target, checkpoint, folder=checkpoint.folder), checkpoint), expected)
    file.write_bytes(file.read_bytes()[:1000])  # a damaged file is replaced
    assert torch.equal(logits(copy_of(target, checkpoint, folder=checkpoint.folder), checkpoint), expected)
    assert file.stat().st_size > 1000


def test_new_weights_are_fitted_with_the_same_moments(target, checkpoint):
    copy = copy_of(target, checkpoint)
    before = logits(copy, checkpoint)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = checkpoint.model.state_dict()[name]
    target.update_weights({name: weight * 2}, 1)
    assert not torch.equal(logits(copy, checkpoint), before)
    target.update_weights({name: weight}, 2)
    assert torch.equal(logits(copy, checkpoint), before)
