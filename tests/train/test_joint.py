"""A module and its target trained together: what is learned, what is seen, what is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch
from outrider.errors import OutriderError
from outrider.heads.hidden_states import normed
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.testing.drive import make_row
from outrider.train.loss.losses import parse
from outrider.train.loss.unroll import unrolled
from outrider.train.model.joint import TARGET, Given, GivenReader, JointTrainee
from outrider.train.report.log import read_log
from outrider.train.run import Training
from outrider.train.settings import Settings
from outrider.train.trainer import Trainer
from tests.helpers import tiny, train_setup
from tests.helpers.train_setup import CPU, NANO, make_settings, make_setup

QUIET = Console(quiet=True)
TEXTS = [
    "<|endoftext|>def add(a, b):\n    return a + b\n",
    "<|endoftext|>import os\nimport sys\n",
    "<|endoftext|>The cat sat on the mat.",
    "<|endoftext|>class Shape:\n    pass\n",
    "<|endoftext|>for i in range(10):\n    print(i)\n",
]


@pytest.fixture(scope="module")
def house():
    return train_setup.house()


def pupil_of(house, *, kind="mtp", share=0.3, **other):
    torch.manual_seed(5)
    settings = make_settings(target=NANO, train_target=share, **other)
    return JointTrainee(kind, settings, make_setup(house), house.tables)


def given(house):
    texts = {i: tuple(house.checkpoint.tokenizer.encode(text)) for i, text in enumerate(TEXTS)}
    return Given(texts).write(range(3), turn=0)


def texts_of(house, ids=None):
    ids = torch.arange(house.target.vocab) if ids is None else ids
    return GivenReader(ids, house.target.vocab).read(given(house), everything=False)


def test_a_law_is_that_the_text_goes_on(house):
    texts = texts_of(house)
    assert texts.learn.sum(1).tolist() == [len(house.checkpoint.tokenizer.encode(text)) - 1 for text in TEXTS[:3]]
    assert torch.equal(texts.target_probs.argmax(-1), texts.tokens[:, 1:][texts.learn])
    assert torch.equal(texts.target_probs.sum(-1), torch.ones(len(texts.target_probs)))
    few = texts_of(house, torch.tensor([5, 7, int(texts.tokens[0, 1])]))
    known = texts.tokens[:, 1:][texts.learn] == texts.tokens[0, 1]
    assert torch.equal(few.target_probs[:, 2] == 1, known)
    assert not few.target_probs[~known].any()


@pytest.mark.parametrize("modules", [1, 2])
def test_the_loss_is_the_targets_and_a_share_of_the_drafts(house, modules):
    pupil, texts = pupil_of(house, mtp_modules=modules), texts_of(house)
    trainer = Trainer(pupil, losses=parse("ce"), steps=2, decay=0.5, lr=1e-4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
        size = texts.learn.shape[1]
        labels = torch.where(texts.learn, texts.tokens[:, 1:], -100)
        out = model(texts.tokens[:, :size], output_hidden_states=True)
        every = out.logits.flatten(0, 1).float()
        own = torch.nn.functional.cross_entropy(every, labels.flatten(), reduction="sum")
        pupil.module["draft"].share_weights(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        seen = replace(texts, aux_states=out.hidden_states[-1][:, :, None])
        lost, columns = 0.0, float(texts.learn[:, 1:].sum())
        for guess, step in enumerate(unrolled(pupil.module["draft"], seen, 2)):
            lost += 0.5**guess * float(-(step.target * step.logits.float().log_softmax(-1)).sum())
    sums = trainer.train([texts], progress=0.5)
    assert sums.columns == columns
    assert sums.loss == pytest.approx((float(own) + 0.3 * lost / 1.5) / columns, rel=1e-3)


def test_how_a_step_is_cut_changes_nothing(house):
    """Neither of the two losses: texts in one part, or each in its own."""
    samples = given(house)
    reader = GivenReader(torch.arange(house.target.vocab), house.target.vocab)
    slopes = []
    for parts in ([samples], [[sample] for sample in samples]):
        trainer = Trainer(pupil_of(house), losses=parse("ce"), steps=2, decay=0.5, lr=1e-4)
        seen = train_setup.watched(trainer)
        trainer.train([reader.read(part, everything=False) for part in parts], progress=0.5)
        slopes.append(seen[0])
    whole, cut = slopes
    assert (whole - cut).norm() < 0.02 * whole.norm()


def test_the_draft_is_trained_on_what_it_will_read(house):
    """The states that the target shows the engine, normed, are those that the module learned from."""
    pupil, texts = pupil_of(house), texts_of(house)
    tokens = texts.tokens[0, : int(texts.learn[0].sum())].tolist()
    row = make_row(tokens, 0)
    house.target.cache.admit(0, tokens)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(tokens),), draft_budget=(0,))
    with torch.inference_mode():
        fed = house.target.score(batch, tree.empty(1, CPU)).feed_hidden_states[house.target.layers - 1][0]
    house.target.cache.release(0)
    model = pupil.module["target"]
    seen = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(seen, normed(fed, house.tables), atol=1e-4)


def test_the_drafts_slopes_reach_the_target(house):
    slopes = {}
    for share in (0.5, 1e-9):
        pupil = pupil_of(house, share=share)
        trainer = Trainer(pupil, losses=parse("ce"), steps=1, decay=1.0, lr=1e-4)
        slopes[share] = train_setup.watched(trainer)
        trainer.train([texts_of(house)], progress=0.5)
    count = sum(weight.numel() for weight in pupil.module["target"].parameters())
    both, alone = (slopes[share][0][:count] for share in slopes)
    assert both.isfinite().all()
    assert not torch.allclose(both, alone, rtol=0.05)


def test_the_targets_tables_are_not_made_orthogonal(house):
    """Also where the draft guesses a part of what they hold."""
    pupil = pupil_of(house, draft_vocab_size=64)
    trainer = Trainer(pupil, losses=parse("ce"), steps=1, decay=1.0, lr=1e-4)
    plain, muon = (
        {id(w) for group in part.param_groups for w in group["params"]} for part in trainer._optimiser._parts
    )
    assert id(pupil.module["target"].get_output_embeddings().weight) in plain
    assert id(pupil.module["target"].model.layers[0].mlp.up_proj.weight) in muon
    assert not plain & muon


def test_measuring_teaches_the_houses_target(house):
    own = train_setup.house()
    pupil = pupil_of(own)
    before = own.target.share_weights().head.clone()
    with torch.no_grad():
        for weight in pupil.module["target"].parameters():
            weight *= 1.25
    proposer = pupil.proposer(make_setup(own))
    assert torch.allclose(own.target.share_weights().head, before * 1.25, rtol=1e-2)
    assert own.target.version == 1
    assert proposer.model.bytes()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medusa", {}, "medusa is trained on a target that stays as it is; use mtp"),
        ("draft", {"init_from": NANO}, "draft is trained on a target that stays as it is; use mtp"),
        ("mtp", {"loss": "ce,length"}, "texts are given here; use ce"),
        ("mtp", {"mtp_modules": 2, "ttt_length": 3}, "mtp drafts 2 tokens"),
    ],
)
def test_what_cannot_be_trained_together(kind, options, message, house):
    with pytest.raises(OutriderError, match=message):
        pupil_of(house, kind=kind, **options)


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
def test_nothing_is_answered(options, message):
    with pytest.raises(OutriderError, match=message):
        make_settings(**{"train_target": 0.3, **options})


def settings_of(data, out, **other):
    small = {
        "batch_size": 2,
        "steps_per_generation": 1,
        "epochs": 3,
        "k": 2,
        "eval_every": 0,
        "max_num_seqs": 2,
        "train_target": 0.3,
        "lr": 1e-3,
    }
    return Settings(out=str(out), data=[data], target=NANO, **small | other)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [{"prompt": text} for text in TEXTS]
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": turns}]))
    return str(file)


def weights(folder):
    return {**load_file(folder / "model.safetensors"), **load_file(folder / TARGET / "model.safetensors")}


def test_a_training_writes_both_and_goes_on_where_it_was_stopped(data, tmp_path, monkeypatch):
    document, lines = Training("mtp", settings_of(data, tmp_path / "whole")).run(QUIET)
    assert document["taught_target"] == str(tmp_path / "whole" / TARGET)
    assert lines[-1]["loss"] < lines[0]["loss"]
    run, count = Training._run_wave, [0]

    def stopping(self):
        if count[0] == 2:
            raise KeyboardInterrupt
        count[0] += 1
        return run(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_run_wave", stopping)
        with pytest.raises(KeyboardInterrupt):
            Training("mtp", settings_of(data, tmp_path / "part")).run(QUIET)
    assert len(read_log(tmp_path / "part")) == 2
    Training("mtp", settings_of(data, tmp_path / "part")).run(QUIET)
    whole, part = (weights(tmp_path / name) for name in ("whole", "part"))
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    before = load_file(embedded("nano") / "model.safetensors")
    taught = load_file(tmp_path / "whole" / TARGET / "model.safetensors")
    assert any(not torch.equal(before[name].float(), taught[name].float()) for name in taught.keys() & before.keys())
    check_pair(tmp_path / "whole")


def check_pair(folder):
    """transformers loads the target, and the engine says with the draft what it says without, and what that says."""
    target = folder / TARGET
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 96, "verifier": "walk"}
    llm = LLM(target, proposer=f"draft:{folder}", k=2, **options)
    plain = LLM(target, proposer="none", **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True)
        ours, theirs = (each.generate(TEXTS[:2], params) for each in (llm, plain))
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        assert sum(each.stats.draft_tokens for each in ours)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt = tokenizer(TEXTS[0], return_tensors="pt", add_special_tokens=False)
    said = model.generate(**prompt, do_sample=False, max_new_tokens=16, min_new_tokens=16)
    greedy = llm.generate([TEXTS[0]], SamplingParams(temperature=0.0, max_tokens=16, min_tokens=16))
    assert list(greedy[0].token_ids) == said[0, prompt["input_ids"].shape[1] :].tolist()


def test_texts_are_whole_and_half_of_one_is_measured_on(data, tmp_path):
    training = Training("mtp", settings_of(data, tmp_path, eval_data=data))
    tokenizer = training._room.parts.tokenizer
    samples = [sample for wave in range(training._course.waves // 3) for sample in training._course.samples(wave)]
    assert sorted(sample.id for sample in samples) == list(range(6))
    by_number = {sample.id: tokenizer.decode(list(sample.tokens)) for sample in samples}
    assert [by_number[i] for i in range(5)] == TEXTS
    assert by_number[5].count("<|assistant|>") == 1
    assert "5" in by_number[5]
    halves = training._gauge._prompts
    assert [len(half) for half in halves] == [len(sample.tokens) // 2 for sample in sorted(samples, key=lambda s: s.id)]


@pytest.mark.parametrize("name", ["Qwen3Config", "MixtralConfig"])
def test_targets_of_other_kinds_show_the_same_states(name, tmp_path):
    tiny.save(tmp_path, tiny.make_config(name, hidden_size=64), seed=3)
    house = train_setup.house(tmp_path)
    settings = make_settings(target=str(tmp_path), train_target=0.3)
    pupil = JointTrainee("mtp", settings, make_setup(house), house.tables)
    tokens = (1, 2, 3, 4, 5)
    house.target.cache.admit(0, tokens)
    batch = Batch(seqs=(make_row(list(tokens), 0),), start=(0,), feed=(tokens,), draft_budget=(0,))
    with torch.inference_mode():
        fed = house.target.score(batch, tree.empty(1, CPU)).feed_hidden_states[house.target.layers - 1][0]
    seen = pupil.module["target"](torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(seen, normed(fed, house.tables), atol=1e-3)
    pupil.save(tmp_path / "out")
    assert Path(tmp_path / "out" / TARGET / "config.json").is_file()
