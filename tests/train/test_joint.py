"""Training of an MTP module together with its target."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.hidden_states import apply_final_norm
from outrider.models.loader.embedded import embedded
from outrider.testing.drive import make_seq
from outrider.train.loss.losses import parse
from outrider.train.loss.unroll import unrolled
from outrider.train.model.joint import TARGET, DatasetCollator, DatasetTexts, JointTrainee
from outrider.train.report.log import read_log
from outrider.train.run import Training
from outrider.train.settings import Settings
from outrider.train.trainer import Trainer
from tests.helpers import tiny, train_setup
from tests.helpers.configured import with_engine
from tests.helpers.train_setup import CPU, NANO, make_settings, make_setup

TEXTS = [
    "<|endoftext|>def add(a, b):\n    return a + b\n",
    "<|endoftext|>import os\nimport sys\n",
    "<|endoftext|>The cat sat on the mat.",
    "<|endoftext|>class Shape:\n    pass\n",
    "<|endoftext|>for i in range(10):\n    print(i)\n",
]


def make_joint_trainee(loaded, *, kind="mtp", weight=0.3, **options):
    torch.manual_seed(5)
    settings = make_settings(target=NANO, train_target=weight, **options)
    return JointTrainee(kind, settings, make_setup(loaded), loaded.tables)


def make_samples(loaded):
    texts = {i: tuple(loaded.checkpoint.tokenizer.encode(text)) for i, text in enumerate(TEXTS)}
    return DatasetTexts(texts).samples(range(3), answer=0)


def make_batch(loaded, ids=None):
    ids = torch.arange(loaded.target.vocab) if ids is None else ids
    return DatasetCollator(ids, loaded.target.vocab).collate(make_samples(loaded), train_on_prompts=False)


def test_target_distribution_is_the_next_token(nano):
    texts = make_batch(nano)
    assert texts.loss_mask.sum(1).tolist() == [len(nano.checkpoint.tokenizer.encode(text)) - 1 for text in TEXTS[:3]]
    assert torch.equal(texts.target_probs.argmax(-1), texts.tokens[:, 1:][texts.loss_mask])
    assert torch.equal(texts.target_probs.sum(-1), torch.ones(len(texts.target_probs)))
    draft_texts = make_batch(nano, torch.tensor([5, 7, int(texts.tokens[0, 1])]))
    in_draft_vocab = texts.tokens[:, 1:][texts.loss_mask] == texts.tokens[0, 1]
    assert torch.equal(draft_texts.target_probs[:, 2] == 1, in_draft_vocab)
    assert not draft_texts.target_probs[~in_draft_vocab].any()


@pytest.mark.parametrize("modules", [1, 2])
def test_loss_is_target_loss_plus_weighted_draft_loss(nano, modules):
    trainee = make_joint_trainee(nano, mtp_modules=modules)
    texts = make_batch(nano)
    trainer = Trainer(trainee, losses=parse("ce"), steps=2, decay=0.5, lr=1e-4)
    draft = trainee.module["draft"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
        size = texts.loss_mask.shape[1]
        labels = torch.where(texts.loss_mask, texts.tokens[:, 1:], -100)
        out = model(texts.tokens[:, :size], output_hidden_states=True)
        logits = out.logits.flatten(0, 1).float()
        target_loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        draft.share_weights(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        draft_texts = replace(texts, aux_states=out.hidden_states[-1][:, :, None])
        draft_loss = 0.0
        columns = float(texts.loss_mask[:, 1:].sum())
        for index, step in enumerate(unrolled(draft, draft_texts, 2)):
            draft_loss += 0.5**index * float(-(step.target * step.logits.float().log_softmax(-1)).sum())
    stats = trainer.train([texts], progress=0.5)
    assert stats.columns == columns
    assert stats.loss == pytest.approx((float(target_loss) + 0.3 * draft_loss / 1.5) / columns, rel=1e-3)


def test_micro_batches_do_not_change_the_gradient(nano):
    """Neither that of the target's loss nor that of the draft's."""
    samples = make_samples(nano)
    collator = DatasetCollator(torch.arange(nano.target.vocab), nano.target.vocab)
    gradients = []
    for groups in ([samples], [[sample] for sample in samples]):
        trainer = Trainer(make_joint_trainee(nano), losses=parse("ce"), steps=2, decay=0.5, lr=1e-4)
        watched_gradients = train_setup.record_gradients(trainer)
        trainer.train([collator.collate(group, train_on_prompts=False) for group in groups], progress=0.5)
        gradients.append(watched_gradients[0])
    one_batch, single_sequences = gradients
    assert (one_batch - single_sequences).norm() < 0.02 * one_batch.norm()


def test_draft_is_trained_on_the_states_of_the_engine(nano):
    """The states that the engine exports, after the final norm, equal those that the module is trained on."""
    trainee = make_joint_trainee(nano)
    texts = make_batch(nano)
    tokens = texts.tokens[0, : int(texts.loss_mask[0].sum())].tolist()
    seq = make_seq(tokens, 0)
    nano.target.cache.admit(0, tokens)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(tokens),), budget=DraftBudget((0,)))
    with torch.inference_mode():
        scores = nano.target.score(batch, tree.empty(1, CPU))
    engine_states = scores.feed_hidden_states[nano.target.layers - 1][0]
    nano.target.cache.release(0)
    model = trainee.module["target"]
    trained_states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(trained_states, apply_final_norm(engine_states, nano.tables), atol=1e-4)


def test_gradients_of_the_draft_loss_reach_the_target(nano):
    gradients = {}
    for weight in (0.5, 1e-9):
        trainee = make_joint_trainee(nano, weight=weight)
        trainer = Trainer(trainee, losses=parse("ce"), steps=1, decay=1.0, lr=1e-4)
        gradients[weight] = train_setup.record_gradients(trainer)
        trainer.train([make_batch(nano)], progress=0.5)
    count = sum(parameter.numel() for parameter in trainee.module["target"].parameters())
    with_draft, without_draft = (gradients[weight][0][:count] for weight in gradients)
    assert with_draft.isfinite().all()
    assert not torch.allclose(with_draft, without_draft, rtol=0.05)


def test_target_embeddings_and_lm_head_use_adamw(nano):
    """Also if the draft vocabulary is smaller than theirs."""
    trainee = make_joint_trainee(nano, draft_vocab_size=64)
    trainer = Trainer(trainee, losses=parse("ce"), steps=1, decay=1.0, lr=1e-4)
    adamw, muon = (
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in trainer.optimizer.optimizers
    )
    assert id(trainee.module["target"].get_output_embeddings().weight) in adamw
    assert id(trainee.module["target"].model.layers[0].mlp.up_proj.weight) in muon
    assert not adamw & muon


def test_evaluation_updates_the_target_of_the_engine():
    loaded = train_setup.load_target()
    trainee = make_joint_trainee(loaded)
    before = loaded.target.share_weights().head.clone()
    with torch.no_grad():
        for weight in trainee.module["target"].parameters():
            weight *= 1.25
    proposer = trainee.proposer(make_setup(loaded))
    assert torch.allclose(loaded.target.share_weights().head, before * 1.25, rtol=1e-2)
    assert loaded.target.version == 1
    assert proposer.model.bytes()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medusa", {}, "medusa cannot be trained together with its target; use mtp"),
        ("draft", {"init_from": NANO}, "draft cannot be trained together with its target; use mtp"),
        ("mtp", {"loss": "ce,length"}, "--train-target trains on given texts; use ce"),
        ("mtp", {"mtp_modules": 2, "ttt_length": 3}, "mtp drafts 2 tokens"),
    ],
)
def test_options_that_do_not_fit_train_target_are_rejected(kind, options, message, nano):
    with pytest.raises(OutriderError, match=message):
        make_joint_trainee(nano, kind=kind, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answers_per_prompt": 2}, "leave --answers-per-prompt out"),
        ({"temperature": 0.5}, "leave --temperature out"),
        ({"ignore_eos": True}, "leave --ignore-eos out"),
        ({"train_on_prompts": True}, "leave --train-on-prompts out"),
        ({"max_tokens": 9}, "leave --max-tokens out"),
        ({"cache_dir": "x"}, "leave --cache-dir out"),
        ({"proposer": "ngram"}, "leave --proposer out"),
        ({"train_target": 0.0}, "use a weight above 0"),
        ({"train_target": math.inf}, "use a weight above 0"),
    ],
)
def test_options_of_answers_are_rejected(options, message):
    with pytest.raises(OutriderError, match=message):
        make_settings(**{"train_target": 0.3, **options})


def make_run_settings(data, out, **options):
    defaults = {
        "batch_size": 2,
        "steps_per_generation": 1,
        "epochs": 2,
        "k": 2,
        "eval_every": 0,
        "max_num_seqs": 2,
        "train_target": 0.3,
        "lr": 1e-3,
    }
    return with_engine(Settings, out=str(out), data=[data], target=NANO, **defaults | options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [{"prompt": text} for text in TEXTS]
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": messages}]))
    return str(file)


def load_weights(folder):
    return {**load_file(folder / "model.safetensors"), **load_file(folder / TARGET / "model.safetensors")}


def test_training_writes_draft_and_target_and_can_be_resumed(data, tmp_path, monkeypatch):
    document, lines = Training("mtp", make_run_settings(data, tmp_path / "complete")).run()
    assert document["trained_target"] == str(tmp_path / "complete" / TARGET)
    assert lines[-1]["loss"] < lines[0]["loss"]
    run_cycle = Training.run_cycle
    num_cycles = [0]

    def run_two_cycles(self):
        if num_cycles[0] == 2:
            raise KeyboardInterrupt
        num_cycles[0] += 1
        return run_cycle(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "run_cycle", run_two_cycles)
        with pytest.raises(KeyboardInterrupt):
            Training("mtp", make_run_settings(data, tmp_path / "resumed")).run()
    assert len(read_log(tmp_path / "resumed")) == 2
    Training("mtp", make_run_settings(data, tmp_path / "resumed")).run()
    complete, resumed = (load_weights(tmp_path / name) for name in ("complete", "resumed"))
    assert complete.keys() == resumed.keys()
    assert all(torch.equal(complete[name], resumed[name]) for name in complete)
    before = load_file(embedded("nano") / "model.safetensors")
    trained = load_file(tmp_path / "complete" / TARGET / "model.safetensors")
    assert any(not torch.equal(before[name].float(), trained[name].float()) for name in trained.keys() & before.keys())
    check_pair(tmp_path / "complete")


def check_pair(folder):
    """Check that the engine generates the same tokens with and without the draft, and the same as transformers."""
    target = folder / TARGET
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 96, "verifier": "walk"}
    speculative = LLM(target, proposer=f"draft:{folder}", k=2, **options)
    plain = LLM(target, proposer="none", **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True)
        completions = speculative.generate(TEXTS[:2], params)
        expected = plain.generate(TEXTS[:2], params)
        assert [completion.token_ids for completion in completions] == [each.token_ids for each in expected]
        assert sum(completion.stats.draft_tokens for completion in completions)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt = tokenizer(TEXTS[0], return_tensors="pt", add_special_tokens=False)
    reference = model.generate(**prompt, do_sample=False, max_new_tokens=16, min_new_tokens=16)
    greedy = speculative.generate([TEXTS[0]], SamplingParams(temperature=0.0, max_tokens=16, min_tokens=16))
    assert list(greedy[0].token_ids) == reference[0, prompt["input_ids"].shape[1] :].tolist()


def test_training_uses_whole_texts_and_evaluation_their_first_half(data, tmp_path):
    training = Training("mtp", make_run_settings(data, tmp_path, eval_data=data, epochs=1))
    tokenizer = training.setup.parts.tokenizer
    schedule = training.schedule
    samples = [sample for cycle in range(schedule.num_cycles) for sample in schedule.samples(cycle)]
    assert sorted(sample.id for sample in samples) == list(range(6))
    by_number = {sample.id: tokenizer.decode(list(sample.tokens)) for sample in samples}
    assert [by_number[i] for i in range(5)] == TEXTS
    assert by_number[5].count("<|assistant|>") == 1
    assert "5" in by_number[5]
    samples.sort(key=lambda sample: sample.id)
    eval_lengths = [len(prompt.tokens) for prompt in training.evaluator.prompts]
    assert eval_lengths == [len(sample.tokens) // 2 for sample in samples]


@pytest.mark.parametrize("name", ["Qwen3Config", "MixtralConfig"])
def test_other_architectures_are_trained_on_the_states_of_the_engine(name, tmp_path):
    tiny.save(tmp_path, tiny.make_config(name, hidden_size=64), seed=3)
    loaded = train_setup.load_target(tmp_path)
    settings = make_settings(target=str(tmp_path), train_target=0.3)
    trainee = JointTrainee("mtp", settings, make_setup(loaded), loaded.tables)
    tokens = (1, 2, 3, 4, 5)
    loaded.target.cache.admit(0, tokens)
    batch = Batch(seqs=(make_seq(list(tokens), 0),), start=(0,), feed=(tokens,), budget=DraftBudget((0,)))
    with torch.inference_mode():
        scores = loaded.target.score(batch, tree.empty(1, CPU))
    engine_states = scores.feed_hidden_states[loaded.target.layers - 1][0]
    out = trainee.module["target"](torch.tensor([tokens]), output_hidden_states=True)
    assert torch.allclose(out.hidden_states[-1][0], apply_final_norm(engine_states, loaded.tables), atol=1e-3)
    trainee.save(tmp_path / "out")
    assert Path(tmp_path / "out" / TARGET / "config.json").is_file()
