"""Tests of the line that a wrong option, value, argument or command prints."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app


def invoke(words):
    return CliRunner().invoke(app, words, prog_name="outrider")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["fit", "--max-minutes", "-3"], "--max-minutes is -3; use a number of at least 0"),
        (["fit", "--max-minutes", " -3\n"], "--max-minutes is -3; use a number of at least 0"),
        (["fit", "--max-minutes", "x"], "--max-minutes is 'x'; use a number"),
        (["fit", "--max-minutes", "a\nb"], "--max-minutes is 'a\\nb'; use a number"),
        (["fit", "--batch", "1.5"], "--batch is '1.5'; use a whole number"),
        (["scale", "--replicas", "0"], "--replicas is 0; use a number of at least 1"),
        (["serve", "--port", "65536"], "--port is 65536; use a number of at most 65535"),
        (["media", "demo", "--seed", "-2"], "--seed is -2; use a number of at least 0"),
        (["run", "--temperature"], "Option '--temperature' requires an argument; see outrider run --help"),
        (["media", "demo", "--seed"], "Option '--seed' requires an argument; see outrider media demo --help"),
        (["run", "--chat=1"], "Option '--chat' does not take a value; see outrider run --help"),
        (["--version=1"], "Option '--version' does not take a value"),
        (
            ["run", "--tempurature", "1"],
            "No such option: --tempurature (Possible options: --temperature); see outrider run --help",
        ),
        (["--unknown"], "No such option: --unknown; see outrider --help"),
        (["rn"], "No such command 'rn'. Did you mean 'run'? See outrider --help"),
        (["unknown"], "No such command 'unknown'; see outrider --help"),
        (["media", "demoo"], "No such command 'demoo'. Did you mean 'demo'? See outrider media --help"),
        (["fit"], "Missing option '--out'; see outrider fit --help"),
        (["convert"], "Missing argument 'DIR'; see outrider convert --help"),
        (
            ["run", "a", "b"],
            "Got unexpected extra argument(s) (b); put a text with spaces in quotes; name a model with --target;"
            " see outrider run --help",
        ),
        (
            ["serve", "@nano"],
            "Got unexpected extra argument(s) (@nano); name a model with --target; see outrider serve --help",
        ),
        (
            ["run", "x", "--temperature", "-1"],
            "temperature is -1.0; use 0 for greedy decoding, or a number from 0.000001 to 10000"
            " (1 samples the model's distribution)",
        ),
        (["run", "x", "--top-p", "0"], "top_p is 0.0; use a number above 0 and up to 1 (1 keeps every token)"),
        (["run", "x", "--seed", "-3"], "seed is -3; use a whole number of at least 0 (None gives a random one)"),
        (["run", "--k", "lots"], "--k is 'lots', and not a number of draft tokens; use for example 4, or auto"),
    ],
)
def test_mistakes_are_one_line(words, line):
    result = invoke(words)
    assert result.exit_code == 2
    assert not result.stdout
    assert result.stderr == f"error: {line}\n"


def test_a_model_is_not_a_prompt(tmp_path, monkeypatch):
    monkeypatch.delenv("OUTRIDER_TARGET", raising=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        result = invoke(["run", str(path)])
        assert result.exit_code == 2
        assert result.stderr == f"error: the prompt is the path of a model; name the model with --target {path}\n"


def test_mistake_of_python_m_outrider():
    command = [sys.executable, "-m", "outrider", "run", "--tempurature", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    suggestion = "No such option: --tempurature (Possible options: --temperature)"
    assert done.stderr == f"error: {suggestion}; see python -m outrider run --help\n"


@pytest.mark.parametrize("words", [[], ["media"]])
def test_without_arguments_the_help_is_printed(words):
    assert invoke(words).output.strip() == invoke([*words, "--help"]).output.strip()
