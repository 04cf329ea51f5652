"""Calibration reads the experts that text would read."""

from __future__ import annotations

import pytest
import torch

from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.make import make_target
from outrider.plan import calibrate
from tests.helpers import tiny

EXPERTS, TOP = 16, 2
CONFIGS = {
    "mixtral": tiny.make_config("MixtralConfig", num_local_experts=EXPERTS, num_experts_per_tok=TOP),
    "qwen3_moe": tiny.make_config(
        "Qwen3MoeConfig", num_experts=EXPERTS, num_experts_per_tok=TOP, moe_intermediate_size=24
    ),
    "olmoe": tiny.make_config("OlmoeConfig", num_experts=EXPERTS, num_experts_per_tok=TOP),
}


@pytest.fixture(scope="module", params=CONFIGS)
def routed(request, tmp_path_factory):
    """A target, and the list that its routers append the experts of a pass to."""
    folder = tiny.save(tmp_path_factory.mktemp("experts") / request.param, CONFIGS[request.param])
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    touched = []
    for layer in checkpoint.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: touched.append(outputs[2]))
    return make_target(checkpoint, slots=4, context=64, kernels="torch"), touched


def count_experts(touched):
    """Return the distinct experts of each layer, averaged, and forget them."""
    counts = [len(indices.unique()) for indices in touched]
    touched.clear()
    assert len(counts) == tiny.LAYERS
    return sum(counts) / len(counts)


@torch.inference_mode()
def test_experts_of_a_measured_pass_grow_with_its_tokens(routed):
    target, touched = routed
    touched.clear()
    counts = []
    for tokens in (1, 2, 4, 8, 16):
        calibrate._measure(target, 1, tokens, 0)
        counts.append(count_experts(touched))
    assert counts[0] == TOP
    assert counts == sorted(set(counts)), counts
    assert counts[-1] > 4 * TOP


@torch.inference_mode()
def test_measured_passes_of_one_shape_read_the_same_experts(routed):
    """The minimum of repeated measurements must not be the luckiest choice of experts."""
    target, touched = routed
    touched.clear()
    choices = []
    for _ in range(2):
        calibrate._measure(target, 2, 8, 0)
        choices.append(torch.cat(touched))
        touched.clear()
    assert torch.equal(*choices)


@torch.inference_mode()
def test_experts_of_a_measured_prefill(routed):
    target, touched = routed
    touched.clear()
    calibrate._measure_prefill(target, 16)
    assert count_experts(touched) > 4 * TOP
