"""Whole trainings: run through, stopped and gone on with, refused, cached, reported, and used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.heads.store import read_head
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.train.data.batches import frequent
from outrider.train.distributed import meet
from outrider.train.report.html import page
from outrider.train.report.log import FILE, read_log
from outrider.train.run import FACTS, Training
from outrider.train.settings import Settings
from outrider.train.trainer import STATE

NANO = str(embedded("nano"))
QUIET = Console(quiet=True)
TEXTS = [
    "<|endoftext|>import os\nimport sys\n",
    "<|endoftext|>def add(a, b):\n",
    "<|endoftext|><|user|>What is 2 + 3?<|end|><|assistant|>",
    "<|endoftext|><|user|>",
    "<|endoftext|><|user|>",
    "<|endoftext|>class Shape:\n",
    "<|endoftext|>The cat sat on the",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"prompt": text} for text in TEXTS]
    lines.append({"messages": [{"role": "user", "content": "What is 17 + 25?"}]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def _settings(data, out, **other):
    small = {
        "target": NANO,
        "proposer": "none",  # so that a text's logits are the same bits on all kernels, run after run
        "batch_size": 2,
        "steps_per_generation": 2,
        "epochs": 2,
        "max_tokens": 8,
        "k": 2,
        "eval_every": 0,
        "max_num_seqs": 4,
    }
    return Settings(out=str(out), data=[data], **small | other)


def _weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def _same(one, other):
    one, other = _weights(one), _weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A training that nothing has stopped, by kind."""
    made = {}

    def make(kind, **other):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            Training(kind, _settings(data, made[kind], **other)).run(QUIET)
        return made[kind]

    return make


KINDS = [
    ("mtp", {}),
    ("dspark", {"draft_vocab_size": 500}),
    ("draft", {"init_from": NANO, "loss": "kl:0.5,tv:0.5"}),
    ("kv-sharing", {}),
]


def _stopped(patch, waves):
    """From now on a training ends abruptly after so many waves."""
    run, count = Training._run_wave, [0]

    def stopping(self):
        if count[0] == waves:
            raise KeyboardInterrupt
        count[0] += 1
        return run(self)

    patch.setattr(Training, "_run_wave", stopping)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "other"), KINDS, ids=[kind for kind, _ in KINDS])
def test_a_training_that_was_stopped_ends_in_the_same_weights(kind, other, data, whole, tmp_path, monkeypatch):
    settings = _settings(data, tmp_path, **other)
    with monkeypatch.context() as patch:
        _stopped(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            Training(kind, settings).run(QUIET)
    assert len(read_log(tmp_path)) == 2
    training = Training(kind, settings)
    document, lines = training.run(QUIET)
    assert (document["waves"], document["steps"]) == (4, 8)
    assert [line["wave"] for line in lines] == [1, 2, 3, 4]
    assert _same(tmp_path, whole(kind, **other))
    mine, theirs = (read_log(folder) for folder in (tmp_path, whole(kind, **other)))
    assert [line["loss"] for line in mine] == [line["loss"] for line in theirs]


def test_what_is_drawn_follows_from_the_wave_alone(data, tmp_path, monkeypatch):
    """A saved state holds the luck of one process; each of several must find its own again."""
    settings = [_settings(data, tmp_path / name, multi_step_share=0.5) for name in "ab"]
    Training("dflash", settings[0]).run(QUIET)
    run = Training._run_wave

    def unlucky(self):
        torch.rand(self._wave + 5)
        return run(self)

    monkeypatch.setattr(Training, "_run_wave", unlucky)
    Training("dflash", settings[1]).run(QUIET)
    assert _same(tmp_path / "a", tmp_path / "b")


def test_no_more_rows_than_prompts_take_memory(data, tmp_path):
    training = Training("mtp", _settings(data, tmp_path, max_num_seqs=10**9))
    assert training._room.parts.target.slots == len(TEXTS)  # and one prompt more, which is kept aside


@pytest.mark.heavy
def test_a_training_that_was_killed_ends_in_the_same_weights(data, whole, tmp_path):
    words = (
        "--batch-size 2 --steps-per-generation 2 "
        "--epochs 2 --max-tokens 8 --k 2 --eval-every 0 --max-num-seqs 4 --threads 1"
    )
    places = ["--target", NANO, "--data", data, "--out", str(tmp_path), "--proposer", "none"]
    command = [sys.executable, "-m", "outrider", "train", "mtp", *places, *words.split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / STATE).exists():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert _same(tmp_path, whole("mtp"))


def test_parts_rows_and_saves_change_nothing(data, whole, tmp_path):
    Training("mtp", _settings(data, tmp_path, eval_every=1, save_every=3)).run(QUIET)
    assert _same(tmp_path, whole("mtp"))


@pytest.mark.parametrize(
    "other", [{"lr": 5e-4}, {"loss": "tv"}, {"seed": 1}, {"epochs": 3}, {"depth": 2}, {"limit": 7}, {"batch_size": 3}]
)
def test_other_options_are_refused(other, data, whole):
    with pytest.raises(OutriderError, match="holds a training with other options; use another --out, or --overwrite"):
        Training("mtp", _settings(data, whole("mtp"), **other))


def test_other_files_are_refused(data, whole, tmp_path):
    other = tmp_path / "prompts.jsonl"
    other.write_text(Path(data).read_text() + '{"prompt": "more"}\n')
    for kind, settings in (
        ("mtp", _settings(str(other), whole("mtp"))),
        ("mtp", _settings(data, whole("mtp"), target=None)),
        ("medusa", _settings(data, whole("mtp"))),
    ):
        with pytest.raises(OutriderError, match="holds a training with other options"):
            Training(kind, settings)
    moved = tmp_path / "moved.jsonl"
    moved.write_text(Path(data).read_text())
    Training("mtp", _settings(str(moved), whole("mtp")))  # what counts is what it holds


def test_a_training_begins_anew_where_it_is_told_to(data, whole, tmp_path):
    Training("mtp", _settings(data, tmp_path, epochs=1, seed=4)).run(QUIET)
    assert not _same(tmp_path, whole("mtp"))
    Training("mtp", _settings(data, tmp_path, overwrite=True)).run(QUIET)
    assert _same(tmp_path, whole("mtp"))
    assert [line["wave"] for line in read_log(tmp_path)] == [1, 2, 3, 4]


def test_a_model_is_not_trained_over(data, whole, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(NANO) / name).read_bytes())
    for restart in (False, True):
        with pytest.raises(OutriderError, match=r"holds a model, and no training that could go on; use another --out$"):
            Training("mtp", _settings(data, tmp_path, overwrite=restart))
    for name in ("config.json", "model.safetensors", FACTS):  # one that was trained, and whose state has been removed
        (tmp_path / name).write_bytes((whole("mtp") / name).read_bytes())
    with pytest.raises(OutriderError, match="use another --out, or --overwrite to train it anew"):
        Training("mtp", _settings(data, tmp_path))
    Training("mtp", _settings(data, tmp_path, overwrite=True))


def test_a_damaged_state_is_told_of(data, tmp_path):
    Training("mtp", _settings(data, tmp_path, epochs=1)).run(QUIET)
    file = tmp_path / STATE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(OutriderError, match=r"state.pt cannot be read .* use --overwrite, or another --out"):
        Training("mtp", _settings(data, tmp_path, epochs=1))
    document, _ = Training("mtp", _settings(data, tmp_path, epochs=1, overwrite=True)).run(QUIET)
    assert document["waves"] == 2


def _full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("kind", "other", "place"),
    [
        ("mtp", {}, "torch.save"),
        ("mtp", {}, "safetensors.torch.serialize_file"),
        ("draft", KINDS[2][1], "transformers.PreTrainedModel.save_pretrained"),
    ],
)
def test_a_full_disk_leaves_what_was_saved(kind, other, place, data, whole, tmp_path, monkeypatch):
    settings, before = _settings(data, tmp_path, **other), []
    with monkeypatch.context() as patch:
        run, count = Training._run_wave, [0]

        def filling(self):
            if count[0] == 2:
                before.append(_weights(tmp_path))
                patch.setattr(place, _full)
            count[0] += 1
            return run(self)

        patch.setattr(Training, "_run_wave", filling)
        with pytest.raises(OutriderError, match=r"No space left on device.*ree some space"):
            Training(kind, settings).run(QUIET)
    after = _weights(tmp_path)
    assert all(torch.equal(before[0][name], after[name]) for name in after)
    assert not list(tmp_path.glob("*.new"))
    Training(kind, settings).run(QUIET)
    assert _same(tmp_path, whole(kind, **other))


def test_a_training_that_is_done_mends_its_files(data, whole, tmp_path):
    settings = _settings(data, tmp_path)
    first, _ = Training("mtp", settings).run(QUIET)
    (tmp_path / "model.safetensors").unlink()
    again, lines = Training("mtp", settings).run(QUIET)
    assert _same(tmp_path, whole("mtp"))
    assert again["held_out"] == first["held_out"]
    assert len(lines) == 4


# What is answered, and how often


def _rounds(training):
    return training._room.parts.engine.stats.rounds


@pytest.mark.slow
def test_a_cache_spares_passes_and_changes_nothing(data, tmp_path):
    other = {"answers_per_prompt": 1, "epochs": 3}
    plain = Training("mtp", _settings(data, tmp_path / "plain", **other))
    plain.run(QUIET)
    cached = Training("mtp", _settings(data, tmp_path / "cached", cache_dir=str(tmp_path / "cache"), **other))
    cached.run(QUIET)
    assert 0 < _rounds(cached) < _rounds(plain)
    assert _same(tmp_path / "plain", tmp_path / "cached")
    later = Training("mtp", _settings(data, tmp_path / "later", cache_dir=str(tmp_path / "cache"), **other))
    later.run(QUIET)
    assert _rounds(later) == 0
    assert _same(tmp_path / "plain", tmp_path / "later")
    # Trainings share what they have in common: another loss asks for the same texts.
    third = Training("mtp", _settings(data, tmp_path / "tv", cache_dir=str(tmp_path / "cache"), loss="tv", **other))
    third.run(QUIET)
    assert _rounds(third) == 0
    small = Training(
        "mtp", _settings(data, tmp_path / "small", cache_dir=str(tmp_path / "few"), cache_gb=1e-5, **other)
    )
    small.run(QUIET)
    assert 0 < sum(file.stat().st_size for file in (tmp_path / "few").rglob("*.safetensors")) < 2e4
    assert _same(tmp_path / "plain", tmp_path / "small")


def test_every_epoch_goes_through_all_prompts(data, tmp_path):
    training = Training("mtp", _settings(data, tmp_path, epochs=3, answers_per_prompt=2))
    course = training._course
    texts = [[sample for wave in (2 * epoch, 2 * epoch + 1) for sample in course.samples(wave)] for epoch in range(3)]
    for epoch in texts:
        assert sorted(sample.id for sample in epoch) == list(range(7))
    answers = [{sample.id: sample.tokens for sample in epoch} for epoch in texts]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]
    twins = [i for i, prompt in training._course._author._prompts.items() if len(prompt) == 2]
    assert len({answers[0][i] for i in twins}) == len(twins) > 1  # one prompt twice is answered in two ways
    steps = course.steps(texts[0], 0)
    assert len(steps) == 2
    assert sorted(sample.id for step in steps for part in step for sample in part) == list(range(7))


def test_a_draft_of_few_tokens_guesses_the_likeliest(data, whole):
    folder = whole("dspark", **KINDS[1][1])
    head = read_head(folder, dtype=torch.float32, device=torch.device("cpu"))
    settings = _settings(data, folder, **KINDS[1][1])
    samples = Training("dspark", settings)._course.samples(0)
    assert torch.equal(head.ids, frequent(samples, 12288, 500, torch.device("cpu")))


def test_the_first_step_learns_from_what_the_target_wrote(data, tmp_path, monkeypatch):
    """Answers stop at the end of text, unless they are told to go on."""
    found = {}
    for go_on in (False, True):
        training = Training("mtp", _settings(data, tmp_path / str(go_on), ignore_eos=go_on, max_tokens=64))
        samples = [sample for wave in range(2) for sample in training._course.samples(wave)]
        ends = training._room.parts.end_ids
        found[go_on] = [any(token in ends for token in sample.tokens[sample.prompt : -1]) for sample in samples]
        lengths = {len(sample.tokens) - sample.prompt for sample in samples}
    assert not any(found[False])
    assert any(found[True])
    assert lengths == {64}


# Before anything is loaded


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("eagle9", {}, "kind 'eagle9' is unknown; use eagle3"),
        ("mtp", {"loss": "x"}, "loss 'x' is unknown"),
        ("mtp", {"target": "nowhere"}, "nowhere is not a folder"),
        ("mtp", {"target": str(embedded("mini").parent)}, "holds no config.json"),
        ("mtp", {"proposer": "nobody"}, "proposer 'nobody' is unknown"),
        ("mtp", {"device": "gpu"}, "device 'gpu' cannot be used here"),
        ("mtp", {"temperature": float("nan")}, "temperature"),
        ("mtp", {"eval_data": "nowhere"}, "nowhere cannot be read"),
        ("dspark", {"draft_vocab_size": 99999}, "use fewer"),
        ("mtp", {"threads": 0}, "use at least 1"),
    ],
)
def test_a_training_that_cannot_be(kind, other, message, data, tmp_path):
    with pytest.raises(OutriderError, match=message):
        Training(kind, _settings(data, tmp_path, **other)).run(QUIET)


@pytest.mark.parametrize(
    ("proposer", "message"),
    [("draft:nowhere", "nowhere is not a folder"), ("ngram:5-1", "ngram:5-1 is no range")],
)
def test_who_cannot_guess_is_told_before_anything_is_loaded(proposer, message, data, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.loader.checkpoint._read_model", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(OutriderError, match=message):
        Training("mtp", _settings(data, tmp_path, proposer=proposer))


@pytest.mark.parametrize(("place", "message"), [("", "is a file; name a folder"), ("/a/b", "is to be in .* a file")])
def test_a_training_writes_into_a_folder(place, message, data, monkeypatch):
    monkeypatch.setattr("outrider.loader.checkpoint._read_model", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(OutriderError, match=f"^--out {data}{place} {message}"):
        Training("mtp", _settings(data, data + place))


def test_a_training_says_what_it_is_also_measured_on(data, tmp_path, caplog):
    training = Training("mtp", _settings(data, tmp_path / "a", eval_data=data, max_num_seqs=2))
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("8 of the 8 prompts to measure on are trained on, too")
    assert training._document({})["held_out_in_data"] == 8


def test_a_training_says_what_it_cuts(tmp_path, caplog):
    lines = [json.dumps({"prompt": text}) for text in ("x " * 3000, "one", "two")]
    (tmp_path / "long.jsonl").write_text("\n".join(lines), "utf-8")
    (tmp_path / "held.jsonl").write_text(lines[1], "utf-8")
    held = str(tmp_path / "held.jsonl")
    Training("mtp", _settings(str(tmp_path / "long.jsonl"), tmp_path / "out", eval_data=held))
    said = [record.getMessage() for record in caplog.records]
    assert "1 of 3 prompts are longer than half of the context and are cut at 1024" in said


def test_processes_wait_for_the_one_that_measures(monkeypatch):
    given = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **named: given.append((args, named)))
    meet(torch.device("cpu"))
    (((kind,), named),) = given
    assert (kind, named.keys()) == ("gloo", {"timeout"})
    assert named["timeout"] > timedelta(hours=12)


# The verb


def test_a_page_that_fails_at_last_does_not_take_the_document_along(data, tmp_path, monkeypatch):
    def fails(text, file):
        raise OutriderError(f"{file} cannot be written")

    made = SimpleNamespace(run=lambda console: ({"benchmark": "outrider train"}, []))
    monkeypatch.setattr("outrider.train.command.Training", lambda kind, settings: made)
    monkeypatch.setattr("outrider.train.command.page", lambda document, lines: "")
    monkeypatch.setattr("outrider.train.command.write_report", fails)
    places = ["--data", data, "--out", str(tmp_path / "draft"), "--report", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, ["train", "mtp", *places])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"benchmark": "outrider train"}
    assert "page.html cannot be written. What was found is not lost" in result.stderr


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.titles, self.open = [], [""]
        self.feed(text)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "onload")
            assert name != "href" or value.startswith("#")

    def handle_data(self, data):
        if self.open[-1] == "h3":
            self.titles.append(data)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def verb(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verb")
    words = (
        "--batch-size 2 --steps-per-generation 2 "
        "--max-tokens 8 --k 2 --eval-every 1 --max-num-seqs 4 --threads 1 --depth 2"
    )
    places = ["--target", NANO, "--data", data, "--out", str(folder / "draft"), "--proposer", "none"]
    page = ["--report", str(folder / "page.html")]
    result = CliRunner().invoke(app, ["train", "hydra", *places, *page, *words.split()])
    assert result.exit_code == 0, result.output
    return folder, result


def test_the_verb_reports(verb):
    folder, result = verb
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["kind"] == "hydra"
    assert document["waves"] == 2
    assert set(document["held_out"]) == {"temperature 0", "temperature 1"}
    assert all(len(each["acceptance"]) == 2 and each["tau"] >= 1 for each in document["held_out"].values())
    assert f"--proposer draft:{folder / 'draft'}" in result.stdout
    kept = json.loads((folder / "draft" / "training.json").read_text())
    assert kept["arguments"]["depth"] == 2
    assert kept["held_out"] == document["held_out"]
    lines = [json.loads(line) for line in (folder / "draft" / FILE).read_text().splitlines()]
    assert [line["wave"] for line in lines] == [1, 2]
    assert lines[-1]["held_out"] == document["held_out"]


def test_the_page_has_what_was_measured(verb):
    folder, _ = verb
    text = (folder / "page.html").read_text("utf-8")
    assert Reader(text).titles == ["Loss", "Kept guesses in training", "Tokens a pass", "Acceptance by position"]
    assert "var(--series-0)" in text
    assert "hydra for nano" in text
    document = json.loads((folder / "draft" / "training.json").read_text())
    assert Reader(page(document | {"eval_data": {}}, [])).titles == []


def test_the_draft_guesses_and_changes_no_text(verb):
    folder, _ = verb
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3)
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128, "verifier": "walk", "k": 2}
    ours = LLM(NANO, proposer=f"draft:{folder / 'draft'}", **options).generate(TEXTS[:3], params)
    theirs = LLM(NANO, proposer="none", **options).generate(TEXTS[:3], params)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert sum(each.stats.draft_tokens for each in ours)


def test_a_trained_model_is_a_draft(data, whole):
    folder = whole("draft", **KINDS[2][1])
    assert not _same(folder, NANO)
    llm = LLM(NANO, proposer=f"draft:{folder}", k=3, max_num_seqs=1, max_model_len=128)
    (completion,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
    assert completion.stats.tau > 1.5  # two waves leave a copy of the target much like it
    assert LLM(str(folder), proposer="none", max_num_seqs=1, max_model_len=64).generate("a")[0].token_ids


def test_a_report_that_cannot_be(data, tmp_path):
    """Said before the training."""
    out = tmp_path / "draft"
    places = ["--target", NANO, "--data", data, "--out", str(out), "--report", str(tmp_path)]
    result = CliRunner().invoke(app, ["train", "mtp", *places])
    assert result.exit_code == 2
    assert "is no file in a folder that exists" in result.stderr
    assert not out.exists()


def test_mistakes_are_one_line(data, tmp_path):
    result = CliRunner().invoke(app, ["train", "eagle3", "--target", NANO, "--data", data, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "error: eagle3 reads three layers, and this target has 2" in result.stderr
    assert CliRunner().invoke(app, ["train", "mtp", "--out", str(tmp_path)]).exit_code == 2
