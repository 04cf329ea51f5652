"""Tests of `outrider tune`: its settings, and whole runs."""

import errno
import io
import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from outrider import OutriderError
from outrider.core.config import EngineConfig
from outrider.core.params import AUTO
from outrider.lab.common import turns
from outrider.lab.tune import measure as tune_measure
from outrider.lab.tune.budget import Budget
from outrider.lab.tune.figures import figures
from outrider.lab.tune.measure import measure
from outrider.lab.tune.run import default_proposers
from outrider.lab.tune.settings import Settings, parse_ks, parse_proposers
from outrider.lab.tune.store import TrialStore
from outrider.models.loader.embedded import embedded
from outrider.runtime.bar import StageBar
from outrider.runtime.progress import shown_on
from tests.helpers import tiny
from tests.helpers.configured import with_engine
from tests.lab.tune.commands import document, invoke

pytestmark = pytest.mark.usefixtures("quick")


def tune(*arguments):
    result = invoke("tune", "--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_lists_of_proposers_and_draft_lengths():
    assert parse_proposers("--proposers", "ngram; suffix:9 ;;ngram") == ("ngram", "suffix:9")
    assert parse_proposers("--proposers", 'draft:"a;b"') == ('draft:"a;b"',)
    assert default_proposers(EngineConfig(target="anything", device="cpu")) == ("ngram", "suffix", "suffix:100000")
    assert default_proposers(EngineConfig())[-1] == f"draft:{embedded('nano')}"
    assert parse_ks("--k", "2,auto,4..6") == (2, 4, 5, 6, AUTO)
    assert parse_ks("--k", "auto") == (AUTO,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proposers": ("none",)}, "plain decoding is always measured as well"),
        ({"proposers": ("merge(ngram",)}, "has an open bracket"),
        ({"proposers": ("ngram,suffix",)}, "separate them by semicolons: 'ngram;suffix'"),
        ({"proposers": ("merge(ngram,recycle), suffix:9",)}, r"semicolons: 'merge\(ngram,recycle\);suffix:9'"),
        ({"proposers": ("draft:no,where",)}, "no,where is not a folder"),
        ({"ks": (0,)}, "k is 0; use a number of draft tokens from 1 to 256"),
        ({"batches": (0,)}, "batch is 0; use at least 1"),
        ({"repeats": 0}, "repeats is 0; use at least 1"),
        ({"limit": 0}, "limit is 0; use at least 1"),
        ({"max_tokens": 2}, "use at least 3"),
        ({"temperatures": (-1.0,)}, "temperature is -1"),
        ({"verifier": "nobody"}, "verifier 'nobody' is unknown"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"proposers": ("ngram", "draft:nowhere")}, "nowhere is not a folder"),
        ({"proposers": ("ngram:5-1",)}, "ngram:5-1 is not a range"),
        ({"draft_window": 0}, "draft_window is 0; use a whole number of at least 1"),
        ({"draft_window": 32}, "the proposer ngram has no draft that reads the text"),
        ({"draft_window": 32, "proposers": ("ngram", "suffix")}, "none of ngram, suffix has a draft that reads"),
        ({"draft_quantize": "int4"}, "draft_quantize is int4 and the proposer ngram has no draft"),
        ({"draft_quantize": "int3"}, "draft_quantize 'int3' is unknown"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(OutriderError, match=message):
        with_engine(Settings, **{"proposers": ("ngram",), **settings})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "many"], "--k is 'many'; use numbers of draft tokens and auto"),
        (["--batch", "x"], "--batch is 'x'"),
        (["--proposers", ";"], "proposers names nothing"),
        (["--proposers", "nobody"], "proposer 'nobody' is unknown"),
        (["--target", "nowhere"], "nowhere is not a folder"),
        (["--proposers", "ngram", "--draft-window", 32], "has no draft that reads the text"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--out", "nowhere/at/all.json"], "nowhere/at/all.json cannot be written"),
    ],
)
def test_command_errors_are_one_line(arguments, message):
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.fixture(scope="module")
def tune_run(prompts, tmp_path_factory):
    """Return the document, the file and the result of a whole run."""
    file = tmp_path_factory.mktemp("advice") / "advice.json"
    arguments = ["--proposers", f"ngram;suffix:500;draft:{embedded('nano')}", "--k", "2,auto", "--batch", "1,2"]
    result = tune("--prompts", prompts, *arguments, "--temperature", "0,1", "--out", file)
    return document(result), file, result


def test_end_to_end(tune_run):
    advice, file, result = tune_run
    assert advice == json.loads(file.read_text())
    assert len(advice["plain"]) == 4
    assert len(advice["cases"]) == 3 * 2 * 4
    draft = next(each for each in advice["cases"] if each["proposer"].startswith("draft"))
    assert (draft["k"], draft["batch"], draft["temperature"]) == (2, 1, 0.0)
    assert set(draft["categories"]) == {"code", "prose"}
    assert draft["categories"]["code"]["speedup"] > 0
    assert list(draft["output_thirds"]) == ["first", "middle", "last"]
    assert all(draft["parts"][part] > 0 for part in ("draft", "target", "host"))
    assert 1 <= draft["total"]["tau"] <= 3
    assert len(draft["total"]["acceptance"]) == 2
    assert draft["overall"]["low"] <= draft["overall"]["value"] <= draft["overall"]["high"]
    assert draft["exact"] is True
    assert advice["memory"][draft["proposer"]]["draft_weight_bytes"] > 0
    assert advice["memory"]["ngram"]["draft_weight_bytes"] == 0
    assert advice["memory"]["ngram"]["sequences"] == 2
    assert all(0 < plain["prefill_share"] < 1 for plain in advice["plain"])
    assert advice["advice"]["bottleneck"] in ("decoding", "prefill")
    for sentence in advice["summary"]:
        assert f"- {sentence}" in result.stdout
    assert "use it as --config" in result.stderr


def test_file_is_checked_before_measuring_and_results_are_printed_if_writing_fails(prompts, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name, message in (("folder", "Is a directory"), ("none/a.json", "cannot be written")):
        result = invoke("tune", "--out", tmp_path / name)
        assert result.exit_code == 2
        assert message in result.stderr
    monkeypatch.setattr("outrider.lab.tune.command.check_writable", lambda path: None)
    sizes = ["--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, "--batch", 1, "--limit", 1]
    options = ["--prompts", prompts, "--proposers", "ngram", "--k", 2, "--out", tmp_path / "folder"]
    result = invoke("tune", *options, *sizes)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert document(result)["settings"]["target"] is None


def test_proposer_does_not_remember_outputs_of_other_variants(prompts):
    """The suffix tree of one variant has no outputs of another variant for the same prompts."""
    advice = document(tune("--prompts", prompts, "--proposers", "suffix;suffix:5000", "--k", "2,4", "--batch", "1"))
    taus = {(case["proposer"], case["k"]): case["total"]["tau"] for case in advice["cases"]}
    # The outputs have little in common. With the outputs of plain decoding or of k 2 in its tree, it would accept
    # nearly every draft token.
    assert taus["suffix:5000", 4] < 2


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("names", [("eagle31", "mtp"), ("mtp", "eagle31")])
def test_draft_heads_with_different_layers(names, kernels, prompts):
    specs = [f"draft:{embedded(name)}" for name in names]
    arguments = ["--proposers", ";".join(specs), "--k", 2, "--batch", 1, "--limit", 1, "--kernels", kernels]
    advice = document(tune("--prompts", prompts, *arguments))
    assert {case["proposer"] for case in advice["cases"]} == set(specs)
    assert all(case["total"]["tau"] > 1 for case in advice["cases"])


def four_prompts(folder, **other):
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"<|endoftext|>def f{i}():"}) for i in range(4)))
    given = {"proposers": ("ngram",), "ks": (2,), "batches": (1,), "max_tokens": 4, "threads": 1, "dtype": "float32"}
    return with_engine(Settings, target=str(embedded("nano")), prompts=str(file), **given, **other)


def test_time_limit_leaves_out_prompts_for_all_proposers_alike(tmp_path):
    settings = four_prompts(tmp_path, repeats=2)
    measured = measure(settings, Console(quiet=True), max_seconds=0.0)
    assert [trial.variant.proposer for trial in measured.trials] == ["", "ngram"]
    assert [trial.batch_number for trial in measured.trials] == [0, 0]


def test_temperatures_share_the_time_limit(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    unchanged = turns.run

    def run_for_a_second(*words):
        clock.now += 1
        return unchanged(*words)

    monkeypatch.setattr(turns, "run", run_for_a_second)
    for module in (turns, tune_measure):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    settings = four_prompts(tmp_path, repeats=1, temperatures=(0.0, 1.0))
    # A warm-up takes two seconds, and each prompt two. Temperature 0 has nine of the seconds, and ends after eight.
    measured = measure(settings, Console(quiet=True), max_seconds=18.0)
    plains, _ = figures(measured.trials, seed=0)
    assert [(plain.temperature, plain.batches) for plain in plains] == [(0.0, 3), (1.0, 3)]
    assert clock.now == 16  # a fourth prompt would end at the limit


def test_costs_are_measured_once_for_all_variants_and_temperatures(tmp_path, monkeypatch):
    measured = []
    unchanged = tune_measure.known_costs
    monkeypatch.setattr(tune_measure, "known_costs", lambda *models: measured.append(models) or unchanged(*models))
    settings = replace(
        four_prompts(tmp_path, repeats=1, temperatures=(0.0, 1.0)), proposers=("ngram", "suffix"), ks=(2, AUTO)
    )
    measure(settings, Console(quiet=True))
    assert len(measured) == 1  # no proposer has a draft model


def interrupt_after(monkeypatch, count):
    """Let Ctrl-C come in a later run."""
    unchanged, runs = turns.run, []

    def run(*words):
        runs.append(words)
        if len(runs) > count:
            raise KeyboardInterrupt
        return unchanged(*words)

    monkeypatch.setattr(turns, "run", run)
    return runs


def test_interrupted_measurement_has_whole_groups_and_resumes(tmp_path, monkeypatch):
    settings = four_prompts(tmp_path, repeats=1)
    file = tmp_path / "advice.json.runs"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2 + 3)  # two warm-ups, one batch of prompts, and one of two variants
        measured = measure(settings, Console(quiet=True), file=file)
    assert not measured.complete
    assert [trial.batch_number for trial in measured.trials] == [0, 0]
    with monkeypatch.context() as patch:
        runs = interrupt_after(patch, 100)
        resumed = measure(settings, Console(quiet=True), file=file)
    assert len(runs) == 2 + 3 * 2
    assert resumed.complete
    assert resumed.trials[:2] == measured.trials
    assert [trial.batch_number for trial in resumed.trials] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not file.exists()


def test_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    file = tmp_path / "advice.json.runs"
    store = TrialStore(file, four_prompts(tmp_path))
    before = list(tmp_path.iterdir())

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OutriderError, match=r"advice\.json\.runs cannot be written .*; free some space"):
            store.begin(Budget(max_tokens=4, variants=2))
    assert list(tmp_path.iterdir()) == before


def test_runs_of_other_settings_are_not_resumed(tmp_path, monkeypatch):
    file = tmp_path / "advice.json.runs"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2 + 2)
        measure(four_prompts(tmp_path, repeats=1), Console(quiet=True), file=file)
    with monkeypatch.context() as patch:
        runs = interrupt_after(patch, 100)
        measure(four_prompts(tmp_path, repeats=1, seed=5), Console(quiet=True), file=file)
    assert len(runs) == 2 + 4 * 2


def test_interrupt_before_anything_is_comparable_ends_the_measurement(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 2 + 1)
    with pytest.raises(KeyboardInterrupt):
        measure(four_prompts(tmp_path, repeats=1), Console(quiet=True))


def test_interrupted_command_prints_what_was_measured(tmp_path, monkeypatch, prompts):
    interrupt_after(monkeypatch, 2 + 2)
    out = tmp_path / "advice.json"
    options = ("--target", embedded("nano"), "--prompts", prompts, "--proposers", "ngram", "--k", 2, "--batch", 1)
    result = invoke("tune", *options, "--out", out)
    assert result.exit_code == 130
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["complete"] is False
    assert found["summary"][0] == "The measurement was interrupted. This is from the 2 runs that were done."
    assert f"its runs are in {out}.runs, and the same command continues" in result.stderr


def test_each_run_has_a_line_where_the_output_is_no_terminal(tmp_path):
    printed = io.StringIO()
    with shown_on(StageBar(Console(file=printed, width=80))):
        measure(four_prompts(tmp_path, repeats=1), Console(quiet=True))
    lines = [line for line in printed.getvalue().splitlines() if " of 8: " in line]
    assert len(lines) == 8
    assert re.fullmatch(r"1 of 8: batch 1, temperature 0, plain decoding: \d+ tokens/s with prompts", lines[0])
    assert re.fullmatch(r"8 of 8: batch 1, temperature 0, plain decoding: \d+ tokens/s with prompts", lines[7])
    terminal = io.StringIO()
    with shown_on(StageBar(Console(file=terminal, force_terminal=True, width=80))):
        measure(four_prompts(tmp_path, repeats=1), Console(quiet=True))
    assert "tokens/s" not in terminal.getvalue()


def test_encoder_decoder_target_is_measured_on_sources(tmp_path):
    folder = tiny.save(tmp_path / "bart", tiny.ENCODER_DECODER["bart"]())
    file = tmp_path / "sources.jsonl"
    lines = ({"source": "abcabc", "category": "x"}, {"source": "hello", "prompt": "h"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--target", folder, "--proposers", "ngram", "--k", 2, "--batch", 1, "--device", "cpu")
    found = document(tune(*options, "--prompts", file))
    (case,) = found["cases"]
    assert set(case["categories"]) == {"x", "prompts"}
    assert case["nodes"] > 0  # it has drafted
    refused = invoke("tune", *options)
    assert refused.exit_code == 2
    assert "the embedded prompts have no sources" in refused.stderr


def test_prompts_are_read_before_models_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_measure, "VariantEngines", None)
    (tmp_path / "empty.jsonl").write_text("")
    refused = invoke("tune", "--prompts", tmp_path / "empty.jsonl")
    assert refused.exit_code == 2
    assert "holds no prompts" in refused.stderr
