"""Stages of work, and how they are shown."""

import io
import json
import logging
from threading import Timer

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.runtime import bar
from outrider.runtime.bar import StageBar
from outrider.runtime.progress import is_shown, shown_on, stage
from tests.helpers import tiny
from tests.helpers.gguf_files import SIZES, write_gguf

OPTIONS = {"proposer": "none", "max_num_seqs": 1, "max_model_len": 64, "dtype": "float32"}


class Recorder:
    """A display that keeps what each stage has done at its end."""

    def __init__(self):
        self.ended = {}

    def begin(self, stage):
        pass

    def update(self, stage, line):
        pass

    def say(self, line):
        pass

    def end(self, stage):
        self.ended[stage.title] = (stage.done, stage.total)


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def test_without_a_display_only_the_announcement_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="outrider")
    with stage("checking", announcement="checking x") as opened:
        opened.advance(3, "line")
        opened.describe("other")
        opened.say("said")
    assert (opened.done, opened.title) == (3, "other")
    assert caplog.messages == ["checking x"]
    assert not is_shown()


def test_lines_without_a_terminal(monkeypatch):
    """Bytes have a line for each tenth at most, and none in the first moments or after the end."""
    times = iter([0.0, 0.1, 5.1, 5.1, 5.2, 11.0, 11.0, 17.0])
    monkeypatch.setattr(bar, "perf_counter", lambda: next(times))
    out = console(terminal=False)
    with shown_on(StageBar(out)), stage("reading x", 1000, counts_bytes=True) as opened:
        for size in (10, 100, 10, 200, 680):
            opened.advance(size)
        opened.say("done")
    opened.advance(1)
    assert out.file.getvalue().splitlines() == ["reading x: 11% of 1.0 kB", "reading x: 32% of 1.0 kB", "done"]


def test_an_announcement_appears_if_the_stage_takes_long(monkeypatch):
    started = []
    monkeypatch.setattr(bar, "Timer", lambda *arguments: started.append(Timer(*arguments)) or started[-1])
    lines = []
    with shown_on(StageBar(console(terminal=False), lines.append)):
        with stage("checking", announcement="checking x"):
            pass
        assert started[0].finished.is_set()  # it is cancelled
        assert lines == []
        monkeypatch.setattr(bar, "LINE_SECONDS", 0.0)
        with stage("checking", announcement="checking x"):
            started[1].join()
    assert lines == ["checking x"]


def test_log_in_place_of_the_console(monkeypatch):
    lines = []
    out = console(terminal=False)
    with shown_on(StageBar(out, lines.append)), stage("", 2) as runs:
        runs.describe("repeat 1")
        runs.advance(line="1 of 2")
    assert lines == ["1 of 2"]
    assert out.file.getvalue() == ""


def test_a_terminal_shows_the_innermost_stage(monkeypatch):
    monkeypatch.setattr(bar, "HIDDEN_SECONDS", 0.0)
    out = console(terminal=True)
    display = StageBar(out)

    def shown():
        out.file.truncate(out.file.seek(0))
        display._bar.refresh()
        return out.file.getvalue()

    with shown_on(display), stage("loading models"):
        with stage("reading x", 4_000_000, counts_bytes=True, announcement="never here") as inner:
            inner.advance(1_000_000)
            text = shown()
            assert "reading x" in text
            assert "1.0/4.0 MB" in text
            assert "loading models" not in text
        text = shown()
        assert "loading models" in text
        assert "reading x" not in text
    assert display.stages == []
    assert "never here" not in out.file.getvalue()


def test_short_work_shows_nothing_on_a_terminal():
    out = console(terminal=True)
    with shown_on(StageBar(out)), stage("loading models"), stage("reading x", 4) as inner:
        inner.advance(4)
    assert "loading" not in out.file.getvalue()
    assert "reading" not in out.file.getvalue()


def test_other_ranks_show_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with bar.shown_on_stderr():
        assert not is_shown()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_load_counts_all_bytes(kernels, tmp_path):
    folder = tiny.save(tmp_path / "model", tiny.EVERY["llama"]())
    model = AutoModelForCausalLM.from_config(
        tiny.make_config("LlamaConfig", **SIZES, head_dim=32, num_hidden_layers=2)
    ).eval()
    file = write_gguf(tmp_path / "model.gguf", model)
    for path in (folder, file):
        recorder = Recorder()
        with shown_on(recorder):
            LLM(path, check="always", kernels=kernels, **OPTIONS)
        done, total = recorder.ended[f"reading the weights of {path.name}"]
        assert total > 10_000
        assert done == pytest.approx(total)
        assert any(title.startswith(f"checking {path.name} against transformers ") for title in recorder.ended)
        assert list(recorder.ended)[-1] == "loading models"


def test_a_command_shows_its_load_and_keeps_standard_output_clean(monkeypatch, tmp_path):
    monkeypatch.setattr(bar, "LINE_SECONDS", 0.0)
    folder = tiny.save(tmp_path / "model", tiny.EVERY["llama"]())
    command = [
        "run",
        "--target",
        str(folder),
        "--proposer",
        "none",
        "--max-tokens",
        "2",
        "--json",
        "--check",
        "always",
        "ab",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert "reading the weights of model: " in result.stderr
    assert "checking the logits of model against transformers " in result.stderr
    assert "--check never" not in result.stderr  # it is checked because of --check
