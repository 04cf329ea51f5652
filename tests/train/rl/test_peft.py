"""The merged weights of policies with LoRA adapters. The tests need PEFT."""

import pytest
import torch

from outrider import OutriderError
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, GRPOSettings, Problem, RolloutEngine, merged_weights

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TOKENS = torch.arange(20, 40)[None]


def policy(shelf, name="policy"):
    return load_trainable(shelf / name, torch.device("cpu")).model


def adapted(model, **options):
    """The model with a LoRA adapter that changes what it computes."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=noise)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "target_modules": "all-linear"},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=str,
)
@torch.no_grad()
def test_merged_weights_compute_what_the_adapter_does(shelf, options):
    plain = policy(shelf)
    model = adapted(policy(shelf), **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = merged_weights(model)
    assert weights.keys() == plain.state_dict().keys()
    expected = model(TOKENS).logits
    assert (plain(TOKENS).logits - expected).abs().max() > 0.01
    plain.load_state_dict(weights)
    assert torch.allclose(plain(TOKENS).logits, expected, atol=1e-4)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with model.disable_adapter():
        original = merged_weights(model)
    assert all(torch.equal(value, original[name]) for name, value in policy(shelf).state_dict().items())


def test_a_model_without_an_adapter_has_its_own_weights(shelf):
    model = policy(shelf)
    weights = merged_weights(model)
    assert weights.keys() == model.state_dict().keys()
    assert not any(value.requires_grad for value in weights.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]), "of type IA3"),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "of type PROMPT_TUNING"),
        (
            peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1]}),
            "model.embed_tokens is a TrainableTokensWrapper",
        ),
    ],
    ids=["ia3", "prompt tuning", "trainable tokens"],
)
def test_adapters_that_are_not_lora_are_refused(shelf, config, message):
    model = peft.get_peft_model(policy(shelf), config)
    with pytest.raises(OutriderError, match=f"{message}, which is not LoRA; use LoraConfig, or give the state_dict of"):
        merged_weights(model)


def test_weights_and_folders_that_are_not_merged_are_refused(shelf, tmp_path):
    engine = RolloutEngine.load(shelf / "policy", dtype="float32", max_num_seqs=2, max_model_len=64)
    model = adapted(policy(shelf))
    with pytest.raises(
        OutriderError, match=r"a PEFT adapter that is not merged; give outrider.train.rl.merged_weights"
    ):
        engine.update_weights(model.state_dict())
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(OutriderError, match=r"holds a PEFT adapter and no model; merge it with merge_and_unload"):
        engine.update_weights(tmp_path / "adapter")
    assert engine.version == 0
    assert engine.update_weights(merged_weights(model)) == 1


def test_grpo_trains_an_adapter(shelf, tmp_path):
    def even(rollout, problem):
        return sum(token % 2 == 0 for token in rollout.token_ids) / len(rollout.token_ids)

    engine = RolloutEngine.load(shelf / "policy", proposer="ngram", k=3, dtype="float32", max_model_len=64)
    settings = GRPOSettings(problems=2, samples=4, max_tokens=8, lr=1e-2, beta=0.05)
    run = GRPO(adapted(policy(shelf)), engine, even, settings)
    base = run.policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    problems = [Problem(prompt=tuple(range(start, start + 6)), answer=start) for start in (20, 60)]
    first, second = run.train(problems, 2, checkpoint=tmp_path)
    assert first.loss != 0
    assert second.version == 2
    assert second.logprob_error < 1e-4  # the engine has the adapter of the first step
    assert torch.equal(run.policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight, base)
    resumed = GRPO(adapted(policy(shelf)), engine, even, settings)
    resumed.restore(tmp_path)
    trained = merged_weights(resumed.policy)
    assert all(torch.equal(value, trained[name]) for name, value in merged_weights(run.policy).items())
