"""The check of a loaded target: near-ties of a router pass it, wrong experts do not, and torch is the second choice."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from outrider.errors import UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader import check
from outrider.models.loader.check import check_target, make_checked_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native.target import NativeTarget
from outrider.models.torch.rounding import TOLERANCE
from outrider.models.torch.routing import prescribed_experts
from tests.helpers import tiny

NATIVE = pytest.param("native", marks=pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler"))
KERNELS = pytest.mark.parametrize("kernels", [NATIVE, "torch"])
CONFIGS = {
    "mixtral": tiny.make_config(
        "MixtralConfig",
        head_dim=16,
        hidden_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.1,  # with sharper attention rounding alone changes the logits
    ),
    "qwen3_moe": tiny.make_config(
        "Qwen3MoeConfig", head_dim=16, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32
    ),
    "llama": tiny.make_config("LlamaConfig", head_dim=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("check")
    return {name: tiny.save(root / name, config) for name, config in CONFIGS.items()}


def load(folder, kernels, dtype="bfloat16"):
    checkpoint = load_checkpoint(folder, dtype=dtype, device="cpu")
    return make_target(checkpoint, slots=1, context=64, kernels=kernels), checkpoint


@pytest.mark.fast_cases("mixtral-native", "qwen3_moe-torch")
@KERNELS
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_every_comparison_of_experts_has_a_wide_margin(name, kernels, folders):
    """Without the target's choice, rounding routes some tokens to other experts, and some errors are above 6%."""
    target, checkpoint = load(folders[name], kernels)
    tolerance = TOLERANCE[torch.bfloat16]
    errors = torch.stack([check.trial_errors(target, checkpoint, seed, tolerance) for seed in range(8)])
    assert float(errors.max()) < 0.75 * tolerance


@pytest.mark.fast_cases("bfloat16-native", "float32-torch")
@KERNELS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wrong_choice_of_experts_fails(kernels, dtype, folders, monkeypatch):
    """The target runs with other experts than its router chooses. The logits alone would agree."""
    target, checkpoint = load(folders["mixtral"], kernels, dtype)
    check_target(target, checkpoint)
    if kernels == "native":
        routers = {key: value for key, value in checkpoint.model.state_dict().items() if key.endswith("gate.weight")}
        target.update_weights({key: value.roll(1, 0) for key, value in routers.items()}, 1)
    else:
        chosen = target.chosen_experts

        def score(batch, draft, first=-1, run=target.score):
            length = sum(map(len, batch.feed)) + sum(draft.width)
            with prescribed_experts(checkpoint.model, [torch.tensor([[0, 1]] * length)] * tiny.LAYERS):
                return run(batch, draft, first)

        monkeypatch.setattr(target, "score", score)
        monkeypatch.setattr(
            target, "chosen_experts", lambda: [torch.zeros_like(each) + torch.tensor([0, 1]) for each in chosen()]
        )
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        check_target(target, checkpoint)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_wrong_weights_of_an_expert_fail(folders):
    target, checkpoint = load(folders["mixtral"], "native")
    experts = {key: value for key, value in checkpoint.model.state_dict().items() if ".experts.down_proj" in key}
    target.update_weights({key: value.roll(1, 0) for key, value in experts.items()}, 1)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        check_target(target, checkpoint)


@torch.inference_mode()
def test_prescribed_expert_takes_the_weight_of_the_one_that_it_replaces(folders):
    model = load_checkpoint(folders["qwen3_moe"], dtype="float32", device="cpu").model
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 9, 70]])
    routers = [layer.mlp.gate for layer in model.model.layers]
    seen = []
    hooks = [router.register_forward_hook(lambda _, args, outputs: seen.append(outputs)) for router in routers]
    own_logits = model(ids).logits
    own = list(seen)
    for hook in hooks:
        hook.remove()
    choices = [outputs[2].clone() for outputs in own]
    with prescribed_experts(model, choices) as gaps:
        assert torch.equal(model(ids).logits, own_logits)
    assert all(not gap.any() for gap in gaps)
    choices[0][1] = -1  # left to the router
    logits, weights, experts = own[0]
    runner_up = logits[2].topk(5).indices[4]
    choices[0][2, 3] = runner_up
    choices[0][0] = choices[0][0].flip(0)  # the order does not matter
    with prescribed_experts(model, choices) as gaps:
        hook = routers[0].register_forward_hook(lambda _, args, outputs: seen.append(outputs))
        model(ids)
        hook.remove()
    _, new_weights, new_experts = seen[-1]
    assert new_experts[2].tolist() == [*experts[2, :3].tolist(), int(runner_up)]
    assert torch.equal(new_weights[1:], weights[1:])
    assert torch.equal(new_weights[0], weights[0].flip(0))
    gap = logits[2, experts[2, 3]] - logits[2, runner_up]
    assert float(gaps[0][2]) == pytest.approx(float(gap / logits[2].square().mean().sqrt()), rel=1e-4)
    assert not gaps[0][:2].any()


@pytest.fixture
def broken_kernels(monkeypatch):
    """Native kernels whose logits are wrong."""
    score = NativeTarget.score

    def wrong(self, batch, draft, first=-1):
        scores = score(self, batch, draft, first)
        scores.logits.mul_(1.5)
        return scores

    monkeypatch.setattr(NativeTarget, "score", wrong)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_model_that_fails_on_native_kernels_runs_on_torch(broken_kernels, folders, caplog):
    with caplog.at_level(logging.WARNING, "outrider"):
        llm = LLM(folders["llama"], proposer=f"draft:{folders['llama']}", k=2, max_num_seqs=1, max_model_len=64)
    assert llm.parts.target.kernels == "torch"
    messages = [record.getMessage() for record in caplog.records if "runs on torch" in record.getMessage()]
    assert len(messages) == 2  # the target and the draft model
    assert "differ from the model's own" in messages[0]


def test_failure_of_quantized_weights_on_triton_kernels(folders, monkeypatch):
    def fail(*_):
        raise UnsupportedModel("the logits differ")

    target = SimpleNamespace(kernels="triton int8", compile_seconds=0.0)
    monkeypatch.setattr(check, "make_target", lambda *_, **__: target)
    monkeypatch.setattr(check, "_passed", fail)
    checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
    with pytest.raises(UnsupportedModel, match="differ; or leave quantize out, since this was on the triton kernels"):
        make_checked_target(checkpoint, slots=1, context=64, bits=8)


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kernels": "native"},
            "differ from the model's own .*; use another model, or transformers.generate for this one$",
        ),
        ({"kernels": "auto", "bits": 8}, "or use kernels torch, since this was on the native kernels"),
        ({"kernels": "auto", "kv_dtype": "int8"}, "or leave kv_dtype out, which was int8"),
    ],
)
def test_failure_that_is_not_tried_on_torch(settings, message, broken_kernels, folders):
    checkpoint = load_checkpoint(folders["llama"], dtype="bfloat16", device="cpu")
    with pytest.raises(UnsupportedModel, match=message):
        make_checked_target(checkpoint, slots=1, context=64, **settings)


@pytest.mark.slow
def test_command_shows_no_warning_of_transformers_before_its_error(tmp_path):
    """transformers would advise to install packages for passes that Outrider makes itself."""
    folder = tiny.save(tmp_path / "mamba", tiny.EVERY["mamba"]())
    command = [sys.executable, "-m", "outrider", "run", "--target", str(folder), "--proposer", "exit:1", "hi"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert result.stderr.startswith("error: this target cannot draft for itself")
    assert result.stderr.count("\n") == 1
