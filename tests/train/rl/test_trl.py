"""`GRPOTrainer` of TRL with our rollouts. The tests of the adapter itself need no TRL."""

from types import SimpleNamespace

import pytest
import torch

from outrider import LLM, OutriderError
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import RolloutEngine, TRLRollouts

OPTIONS = {"k": 3, "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_model_len": 96}
ARGUMENTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_completion_length": 8,
    "seed": 3,
}


def rollouts(shelf, proposer="ngram", **options):
    return TRLRollouts(RolloutEngine.load(shelf / "policy", proposer=proposer, **{**OPTIONS, **options}))


def trainer(shelf, *, step=0, **arguments):
    """What the adapter reads of a GRPOTrainer."""
    return SimpleNamespace(
        args=SimpleNamespace(**{**ARGUMENTS, **arguments}),
        state=SimpleNamespace(global_step=step),
        accelerator=SimpleNamespace(process_index=0, unwrap_model=lambda model: model),
        model=load_trainable(shelf / "policy", torch.device("cpu")).model,
        processing_class=SimpleNamespace(eos_token_id=3),
    )


def test_the_form_of_the_rollouts(shelf):
    function = rollouts(shelf)
    grpo = trainer(shelf)
    out = function(["class A:"] * 3 + ["def f"], grpo)
    assert set(out) == {"prompt_ids", "completion_ids", "logprobs", "outrider_tau"}
    assert [len(out[key]) for key in out] == [4] * 4
    assert out["prompt_ids"][0] == out["prompt_ids"][2] != out["prompt_ids"][3]
    assert len({tuple(ids) for ids in out["completion_ids"]}) == 4  # samples differ
    assert [len(ids) for ids in out["completion_ids"]] == [len(values) for values in out["logprobs"]]
    assert function.engine.version == 1
    again = function(["class A:"] * 3 + ["def f"], grpo)
    assert again["completion_ids"] != out["completion_ids"]  # another call of the same step
    assert function.engine.version == 1
    grpo.state.global_step = 1
    function(["class A:"], grpo)
    assert function.engine.version == 2
    other = rollouts(shelf)(["class A:"] * 3 + ["def f"], trainer(shelf))
    assert other == out  # a seed determines a run


def test_a_failed_rollout_is_masked(shelf):
    function = rollouts(shelf)
    grpo = trainer(shelf)
    function(["a"], grpo)
    with torch.no_grad():
        grpo.model.lm_head.weight.mul_(1e38)  # the logits are infinite, but no weight is
    grpo.state.global_step = 1
    out = function(["a", "b"], grpo)
    assert out["completion_ids"] == [[3], [3]]
    assert out["env_mask"] == [[0], [0]]
    assert out["logprobs"] == [[0.0], [0.0]]


def test_what_is_refused(shelf):
    function = rollouts(shelf)
    for arguments, message in (
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs is set"),
        ({"use_vllm": True}, "use_vllm is set"),
    ):
        with pytest.raises(OutriderError, match=message):
            function(["a"], trainer(shelf, **arguments))
    image = [[{"role": "user", "content": [{"type": "image"}]}]]
    with pytest.raises(OutriderError, match="content that is no text"):
        function(image, trainer(shelf))
    with pytest.raises(OutriderError, match="chat_template_kwargs"):
        function([[{"role": "user", "content": "a"}]], trainer(shelf, chat_template_kwargs={"x": 1}))
    grpo = trainer(shelf)
    grpo.model.peft_config = {"default": SimpleNamespace(peft_type="IA3")}
    grpo.state.global_step = 5
    with pytest.raises(OutriderError, match="an adapter of type IA3, which is not LoRA; use LoraConfig, or"):
        function(["a"], grpo)
    lossy = RolloutEngine(LLM(shelf / "policy", proposer="ngram", verifier="typical", **OPTIONS), allow_lossy="typical")
    with pytest.raises(OutriderError, match="typical is lossy, and TRL does not correct"):
        TRLRollouts(lossy)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_training_with_trl(shelf, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    taus = []
    errors = []

    def even(completion_ids, outrider_tau, **_):
        taus.extend(outrider_tau)
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(shelf / "policy")
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([3, 0])
    trained = []
    for proposer in (f"draft:{shelf / 'draft'}", "none"):
        arguments = _arguments(tmp_path, learning_rate=1e-2)
        function = rollouts(shelf, proposer, verifier="coupled")
        model = load_trainable(shelf / "policy", torch.device("cpu")).model
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=even,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["class A:", "def f", "import os"]}),
            processing_class=tokenizer,
            rollout_func=function,
        )
        errors += _watch_logprobs(trainer, function)
        trainer.train()
        assert function.engine.version == 2
        trained.append(model.state_dict())
    assert len(errors) == 2
    assert all(len(each) == 8 and max(each) < 1e-4 for each in errors)
    assert any(tau > 1 for tau in taus[:8])
    assert set(taus[8:]) == {1.0}
    if function.engine.provenance.same_tokens:
        assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_training_a_lora_adapter_with_trl(shelf, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(shelf / "policy")
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([3, 0])
    function = rollouts(shelf, verifier="coupled")
    start = function.engine.llm.weights.checksum()
    trainer = GRPOTrainer(
        model=load_trainable(shelf / "policy", torch.device("cpu")).model,
        reward_funcs=lambda completion_ids, **_: [sum(token % 2 == 0 for token in ids) for ids in completion_ids],
        args=_arguments(tmp_path, learning_rate=1e-1),
        train_dataset=Dataset.from_dict({"prompt": ["class A:", "def f", "import os"]}),
        processing_class=tokenizer,
        rollout_func=function,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    errors = _watch_logprobs(trainer, function)
    trainer.train()
    assert function.engine.version == 2
    assert function.engine.llm.weights.checksum() != start  # of the second step: the adapter has changed
    assert all(max(each) < 1e-4 for each in errors)


def _arguments(folder, *, learning_rate):
    """Return the arguments of a training with two steps."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        learning_rate=learning_rate,
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=1,
        save_strategy="no",
        disable_tqdm=True,
    )


def _watch_logprobs(trainer, function):
    """Compare the log-probabilities of TRL's loss with those of the rollouts; TRL shuffles the rows of a batch."""
    compute = trainer._get_per_token_logps_and_entropies
    errors = []

    def watch(model, input_ids, attention_mask, *args, **keywords):
        out = compute(model, input_ids, attention_mask, *args, **keywords)
        by_tokens = {each.prompt_token_ids + each.token_ids: each for each in function.last.rollouts}
        for logprobs, ids, mask in zip(out[0].detach(), input_ids, attention_mask, strict=True):
            rollout = by_tokens[tuple(ids[mask.bool()].tolist())]
            own = torch.tensor(rollout.sampled_logprobs)
            errors.append(float((logprobs[: len(own)] - own).abs().max()))
        return out

    trainer._get_per_token_logps_and_entropies = watch
    return [errors]
