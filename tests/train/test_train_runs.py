"""Complete trainings: results, resuming, rejected options, the feature cache, reports, and use of the draft."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.drafting.propose.vocabulary.reduced import read_draft_vocabulary
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.store import read_head
from outrider.models.loader.embedded import embedded
from outrider.train.data.batches import most_frequent_tokens
from outrider.train.distributed import join_group
from outrider.train.report.card import model_card
from outrider.train.report.log import FILE, read_log
from outrider.train.run import FACTS, Training
from outrider.train.settings import Settings
from outrider.train.trainer import STATE
from tests.helpers.configured import with_engine

NANO = str(embedded("nano"))
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


def _settings(data, out, **options):
    defaults = {
        "target": NANO,
        "proposer": "none",  # so that logits are the same bits in every run, on all kernels
        "batch_size": 2,
        "steps_per_generation": 2,
        "epochs": 2,
        "max_tokens": 8,
        "k": 2,
        "eval_every": 0,
        "max_num_seqs": 4,
    }
    return with_engine(Settings, out=str(out), data=[data], **defaults | options)


def _weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def _same_weights(folder, other_folder):
    weights = _weights(folder)
    other_weights = _weights(other_folder)
    same_names = weights.keys() == other_weights.keys()
    return same_names and all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Return the folder of an uninterrupted training of a kind. Each kind is trained once."""
    folders = {}

    def train(kind, **options):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            Training(kind, _settings(data, folders[kind], **options)).run()
        return folders[kind]

    return train


OPTIONS = {
    "mtp": {},
    "dspark": {"draft_vocab_size": 500},
    "dflash2": {},
    "jetspec": {"mask_token_id": 9},
    "xpress": {"draft_vocab_size": 500, "passes_per_generation": 2},
    "draft": {"init_from": NANO, "loss": "kl:0.5,tv:0.5", "draft_vocab_size": 500},
    "kv-sharing": {},
}


def _interrupt_after(patch, cycles):
    """Let trainings raise KeyboardInterrupt after this number of generation cycles."""
    run_cycle = Training.run_cycle
    num_cycles = [0]

    def run_or_interrupt(self):
        if num_cycles[0] == cycles:
            raise KeyboardInterrupt
        num_cycles[0] += 1
        return run_cycle(self)

    patch.setattr(Training, "run_cycle", run_or_interrupt)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), OPTIONS.items(), ids=list(OPTIONS))
def test_resumed_training_ends_in_the_same_weights(kind, options, data, uninterrupted, tmp_path, monkeypatch):
    settings = _settings(data, tmp_path, **options)
    with monkeypatch.context() as patch:
        _interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            Training(kind, settings).run()
    assert len(read_log(tmp_path)) == 2
    training = Training(kind, settings)
    document, lines = training.run()
    assert (document["cycles"], document["steps"]) == (4, 8 * options.get("passes_per_generation", 1))
    assert [line["cycle"] for line in lines] == [1, 2, 3, 4]
    expected = uninterrupted(kind, **options)
    assert _same_weights(tmp_path, expected)
    assert [line["loss"] for line in read_log(tmp_path)] == [line["loss"] for line in read_log(expected)]


@pytest.mark.slow
def test_random_numbers_depend_only_on_the_cycle(data, tmp_path, monkeypatch):
    """A saved state has the random generator of one process, so each process seeds its own anew in each cycle."""
    settings = [_settings(data, tmp_path / name, multi_step_share=0.5) for name in "ab"]
    Training("dflash", settings[0]).run()
    run_cycle = Training.run_cycle

    def draw_and_run(self):
        torch.rand(self._cycle + 5)
        return run_cycle(self)

    monkeypatch.setattr(Training, "run_cycle", draw_and_run)
    Training("dflash", settings[1]).run()
    assert _same_weights(tmp_path / "a", tmp_path / "b")


def test_engine_has_no_more_slots_than_prompts(data, tmp_path):
    training = Training("mtp", _settings(data, tmp_path, max_num_seqs=10**9))
    assert training.setup.parts.target.slots == len(TEXTS)  # the data has one more prompt, which is held out


@pytest.mark.heavy
def test_killed_training_ends_in_the_same_weights(data, uninterrupted, tmp_path):
    options = (
        "--batch-size 2 --steps-per-generation 2 "
        "--epochs 2 --max-tokens 8 --k 2 --eval-every 0 --max-num-seqs 4 --threads 1"
    )
    paths = ["--target", NANO, "--data", data, "--out", str(tmp_path), "--proposer", "none"]
    command = [sys.executable, "-m", "outrider", "train", "mtp", *paths, *options.split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / STATE).exists():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert _same_weights(tmp_path, uninterrupted("mtp"))


def test_evaluations_and_saves_do_not_change_the_weights(data, uninterrupted, tmp_path):
    Training("mtp", _settings(data, tmp_path, eval_every=1, save_every=3)).run()
    assert _same_weights(tmp_path, uninterrupted("mtp"))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 5e-4},
        {"loss": "tv"},
        {"seed": 1},
        {"epochs": 3},
        {"depth": 2},
        {"max_prompts": 7},
        {"batch_size": 3},
        {"quantize": "int8"},
        {"dtype": "float32"},
    ],
)
def test_resuming_with_other_options_is_rejected(options, data, uninterrupted):
    with pytest.raises(OutriderError, match="has a training with other options; use another --out, or --overwrite"):
        Training("mtp", _settings(data, uninterrupted("mtp"), **options))


def test_resuming_with_other_files_is_rejected(data, uninterrupted, tmp_path):
    other_data = tmp_path / "prompts.jsonl"
    other_data.write_text(Path(data).read_text() + '{"prompt": "more"}\n')
    for kind, settings in (
        ("mtp", _settings(str(other_data), uninterrupted("mtp"))),
        ("mtp", _settings(data, uninterrupted("mtp"), target=None)),
        ("medusa", _settings(data, uninterrupted("mtp"))),
    ):
        with pytest.raises(OutriderError, match="has a training with other options"):
            Training(kind, settings)
    # Another path with the same contents is accepted.
    copied_data = tmp_path / "copied.jsonl"
    copied_data.write_text(Path(data).read_text())
    Training("mtp", _settings(str(copied_data), uninterrupted("mtp")))


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A copy of the folder of a finished training."""
    return Path(shutil.copytree(uninterrupted("mtp"), tmp_path / "finished"))


def test_overwrite_starts_a_new_training(data, finished, uninterrupted):
    Training("mtp", _settings(data, finished, epochs=1, overwrite=True)).run()
    assert [line["cycle"] for line in read_log(finished)] == [1, 2]
    assert not _same_weights(finished, uninterrupted("mtp"))
    assert read_log(finished)[0]["loss"] == read_log(uninterrupted("mtp"))[0]["loss"]


def test_model_in_the_output_folder_is_not_overwritten(data, uninterrupted, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(NANO) / name).read_bytes())
    for overwrite in (False, True):
        message = r"has a model, but no training that can be resumed; use another --out$"
        with pytest.raises(OutriderError, match=message):
            Training("mtp", _settings(data, tmp_path, overwrite=overwrite))
    # With --overwrite, a trained draft without its state is trained anew.
    for name in ("config.json", "model.safetensors", FACTS):
        (tmp_path / name).write_bytes((uninterrupted("mtp") / name).read_bytes())
    with pytest.raises(OutriderError, match="use another --out, or --overwrite to train it anew"):
        Training("mtp", _settings(data, tmp_path))
    Training("mtp", _settings(data, tmp_path, overwrite=True))


def test_damaged_state_is_reported(data, finished):
    file = finished / STATE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(OutriderError, match=r"state.pt cannot be read .* use --overwrite, or another --out"):
        Training("mtp", _settings(data, finished))
    Training("mtp", _settings(data, finished, overwrite=True))


def _raise_disk_full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.fast_cases("mtp-safetensors.torch.serialize_file")
@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("mtp", "torch.save"),
        ("mtp", "safetensors.torch.serialize_file"),
        ("draft", "transformers.PreTrainedModel.save_pretrained"),
    ],
)
def test_full_disk_leaves_saved_files_intact(kind, function, data, uninterrupted, tmp_path, monkeypatch):
    settings = _settings(data, tmp_path, **OPTIONS[kind])
    saved_weights = []
    with monkeypatch.context() as patch:
        run_cycle = Training.run_cycle
        num_cycles = [0]

        def fill_disk_after_two_cycles(self):
            if num_cycles[0] == 2:
                saved_weights.append(_weights(tmp_path))
                patch.setattr(function, _raise_disk_full)
            num_cycles[0] += 1
            return run_cycle(self)

        patch.setattr(Training, "run_cycle", fill_disk_after_two_cycles)
        with pytest.raises(OutriderError, match=r"No space left on device.*ree some space"):
            Training(kind, settings).run()
    weights = _weights(tmp_path)
    assert all(torch.equal(saved_weights[0][name], weights[name]) for name in weights)
    assert not list(tmp_path.glob("*.new"))
    Training(kind, settings).run()
    assert _same_weights(tmp_path, uninterrupted(kind, **OPTIONS[kind]))


def test_model_card_states_base_results_use_and_data(finished):
    facts = json.loads((finished / FACTS).read_text())
    card = (finished / "README.md").read_text()
    assert card.startswith(f"---\nbase_model: {facts['target']}\nlibrary_name: outrider\ntags:\n")
    (greedy, sampled) = (each["tau_by_category"] for each in facts["evaluation"].values())
    for category in greedy:
        assert f"| {category} | {greedy[category]:.2f} | {sampled[category]:.2f} |" in card
    assert f"--proposer draft:{facts['out']}" in card
    assert f"outrider export {facts['out']}" in card
    assert all(f"| {digest} |" in card for digest in facts["data"])
    assert "No license is stated" in card


def test_license_of_the_target_is_in_the_card(finished, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Model\n")
    facts = json.loads((finished / FACTS).read_text())
    facts["arguments"]["target"] = str(tmp_path)
    assert "\nlicense: apache-2.0\n" in model_card(facts)


def test_finished_training_restores_missing_files(data, finished, uninterrupted):
    first = json.loads((finished / FACTS).read_text())
    (finished / "model.safetensors").unlink()
    second, lines = Training("mtp", _settings(data, finished)).run()
    assert _same_weights(finished, uninterrupted("mtp"))
    assert second["evaluation"] == first["evaluation"]
    assert len(lines) == 4


# Answers


def _num_rounds(training):
    return training.setup.parts.engine.stats.rounds


@pytest.mark.slow
def test_feature_cache_saves_passes_and_does_not_change_the_weights(data, tmp_path):
    options = {"answers_per_prompt": 1, "epochs": 3}
    cache = str(tmp_path / "cache")
    uncached = Training("mtp", _settings(data, tmp_path / "uncached", **options))
    uncached.run()
    cached = Training("mtp", _settings(data, tmp_path / "cached", cache_dir=cache, **options))
    cached.run()
    assert 0 < _num_rounds(cached) < _num_rounds(uncached)
    assert _same_weights(tmp_path / "uncached", tmp_path / "cached")
    later = Training("mtp", _settings(data, tmp_path / "later", cache_dir=cache, **options))
    later.run()
    assert _num_rounds(later) == 0
    assert _same_weights(tmp_path / "uncached", tmp_path / "later")
    # A training with another loss uses the same answers.
    other_loss = Training("mtp", _settings(data, tmp_path / "tv", cache_dir=cache, loss="tv", **options))
    other_loss.run()
    assert _num_rounds(other_loss) == 0
    limited = Training(
        "mtp", _settings(data, tmp_path / "limited", cache_dir=str(tmp_path / "few"), cache_dir_gb=1e-5, **options)
    )
    limited.run()
    assert 0 < sum(file.stat().st_size for file in (tmp_path / "few").rglob("*.safetensors")) < 2e4
    assert _same_weights(tmp_path / "uncached", tmp_path / "limited")


def test_every_epoch_uses_all_prompts(data, tmp_path):
    training = Training("mtp", _settings(data, tmp_path, epochs=3, answers_per_prompt=2))
    schedule = training.schedule
    epochs = []
    for epoch in range(3):
        epochs.append([*schedule.samples(2 * epoch), *schedule.samples(2 * epoch + 1)])
        assert sorted(sample.id for sample in epochs[-1]) == list(range(7))
    answers = [{sample.id: sample.tokens for sample in samples} for samples in epochs]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]
    # Equal prompts get different answers.
    equal_prompts = [sample.id for sample in epochs[0] if sample.prompt == 2]
    assert len({answers[0][i] for i in equal_prompts}) == len(equal_prompts) > 1
    steps = schedule.steps(epochs[0], 0)
    assert len(steps) == 2
    assert sorted(sample.id for step in steps for group in step for sample in group) == list(range(7))


def test_draft_vocabulary_has_the_most_frequent_tokens(data, uninterrupted, tmp_path):
    folder = uninterrupted("dspark", **OPTIONS["dspark"])
    head = read_head(folder, dtype=torch.float32, device=torch.device("cpu"))
    settings = _settings(data, folder, **OPTIONS["dspark"])
    samples = Training("dspark", settings).schedule.samples(0)
    expected = most_frequent_tokens(samples, 12288, 500, torch.device("cpu"))
    assert torch.equal(head.ids, expected)
    draft = uninterrupted("draft", **OPTIONS["draft"])
    assert torch.equal(read_draft_vocabulary(draft, 12288), expected)
    with pytest.raises(OutriderError, match="has a draft vocabulary of 500 tokens; leave --draft-vocab-size out"):
        Training("draft", _settings(data, tmp_path, init_from=str(draft), draft_vocab_size=400))


def test_answers_end_at_end_of_text_unless_ignore_eos(data, tmp_path):
    has_end = {}
    for ignore_eos in (False, True):
        settings = _settings(data, tmp_path / str(ignore_eos), ignore_eos=ignore_eos, max_tokens=64)
        training = Training("mtp", settings)
        samples = [sample for cycle in range(2) for sample in training.schedule.samples(cycle)]
        end_ids = training.setup.parts.end_ids
        has_end[ignore_eos] = [
            any(token in end_ids for token in sample.tokens[sample.prompt : -1]) for sample in samples
        ]
        lengths = {len(sample.tokens) - sample.prompt for sample in samples}
    assert not any(has_end[False])
    assert any(has_end[True])
    assert lengths == {64}


# Errors and warnings


@pytest.mark.parametrize(
    ("kind", "options", "message"),
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
def test_invalid_trainings_are_rejected(kind, options, message, data, tmp_path):
    with pytest.raises(OutriderError, match=message):
        Training(kind, _settings(data, tmp_path, **options)).run()


@pytest.mark.parametrize(
    ("proposer", "message"), [("draft:nowhere", "nowhere is not a folder"), ("ngram:5-1", "ngram:5-1 is not a range")]
)
def test_proposer_is_checked_before_the_target_is_loaded(proposer, message, data, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.load.name_weights", lambda *args: pytest.fail("the target was loaded"))
    with pytest.raises(OutriderError, match=message):
        Training("mtp", _settings(data, tmp_path, proposer=proposer))


@pytest.mark.parametrize(
    ("suffix", "message"), [("", "is a file; name a folder"), ("/a/b", "is inside .* which is a file; name a folder")]
)
def test_output_must_be_a_folder(suffix, message, data, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.load.name_weights", lambda *args: pytest.fail("the target was loaded"))
    with pytest.raises(OutriderError, match=f"^--out {data}{suffix} {message}"):
        Training("mtp", _settings(data, data + suffix))


def test_repeated_evaluation_prompts_are_reported(data, tmp_path, caplog):
    Training("mtp", _settings(data, tmp_path / "a", eval_data=data, max_num_seqs=2))
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("8 of the 8 evaluation prompts are also training prompts")


def test_cut_prompts_are_reported(tmp_path, caplog):
    lines = [json.dumps({"prompt": text}) for text in ("x " * 3000, "one", "two")]
    (tmp_path / "long.jsonl").write_text("\n".join(lines), "utf-8")
    (tmp_path / "held.jsonl").write_text(lines[1], "utf-8")
    eval_data = str(tmp_path / "held.jsonl")
    Training("mtp", _settings(str(tmp_path / "long.jsonl"), tmp_path / "out", eval_data=eval_data))
    messages = [record.getMessage() for record in caplog.records]
    assert "1 of 3 prompts are longer than half of the context and are cut to 1024 tokens" in messages


def test_processes_wait_long_for_the_evaluation(monkeypatch):
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **named: calls.append((args, named)))
    join_group(torch.device("cpu"))
    (((backend,), options),) = calls
    assert (backend, options.keys()) == ("gloo", {"timeout"})
    assert options["timeout"] > timedelta(hours=12)


# The command


@pytest.fixture(scope="module")
def command_run(data, tmp_path_factory):
    """The folder of a training of hydra by the command, and its result."""
    folder = tmp_path_factory.mktemp("command")
    options = (
        "--batch-size 2 --steps-per-generation 2 "
        "--max-tokens 8 --k 2 --eval-every 1 --max-num-seqs 4 --threads 1 --depth 2"
    )
    paths = ["--target", NANO, "--data", data, "--out", str(folder / "draft"), "--proposer", "none"]
    result = CliRunner().invoke(app, ["train", "hydra", *paths, *options.split()])
    assert result.exit_code == 0, result.output
    return folder, result


def test_command_prints_and_writes_the_results(command_run):
    folder, result = command_run
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["kind"] == "hydra"
    assert document["cycles"] == 2
    assert set(document["evaluation"]) == {"temperature 0", "temperature 1"}
    assert all(len(each["acceptance"]) == 2 and each["tau"] >= 1 for each in document["evaluation"].values())
    assert f"--proposer draft:{folder / 'draft'}" in result.stdout
    facts = json.loads((folder / "draft" / "training.json").read_text())
    assert facts["arguments"]["depth"] == 2
    assert facts["evaluation"] == document["evaluation"]
    lines = [json.loads(line) for line in (folder / "draft" / FILE).read_text().splitlines()]
    assert [line["cycle"] for line in lines] == [1, 2]
    assert lines[-1]["evaluation"] == document["evaluation"]


def test_trained_head_drafts_and_leaves_the_output_unchanged(command_run):
    folder, _ = command_run
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3)
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128, "verifier": "walk", "k": 2}
    completions = LLM(NANO, proposer=f"draft:{folder / 'draft'}", **options).generate(TEXTS[:3], params)
    expected = LLM(NANO, proposer="none", **options).generate(TEXTS[:3], params)
    assert [completion.token_ids for completion in completions] == [each.token_ids for each in expected]
    assert sum(completion.stats.draft_tokens for completion in completions)


def test_trained_draft_model_drafts_and_runs_as_a_target(data, uninterrupted):
    folder = uninterrupted("draft", **OPTIONS["draft"])
    assert not _same_weights(folder, NANO)
    llm = LLM(NANO, proposer=f"draft:{folder}", k=3, max_num_seqs=1, max_model_len=128)
    (completion,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
    # The draft started as a copy of the target, and so short a training changes it little. It lacks some tokens.
    assert completion.stats.tau > 1.2
    assert LLM(str(folder), proposer="none", max_num_seqs=1, max_model_len=64).generate("a")[0].token_ids


def test_errors_are_one_line(data, tmp_path):
    result = CliRunner().invoke(app, ["train", "eagle3", "--target", NANO, "--data", data, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "error: eagle3 reads three layers, and this target has 2" in result.stderr
    assert CliRunner().invoke(app, ["train", "mtp", "--out", str(tmp_path)]).exit_code == 2
