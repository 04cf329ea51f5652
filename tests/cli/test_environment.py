"""Environment variables of options, and completion."""

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.models.loader.embedded import embedded

NANO = str(embedded("nano"))
ESTIMATES = ("project", "fleet")  # they describe other machines than this one
SHARED = ("target", "proposer", "config", "device", "kernels", "threads", "host", "port", "api_key", "max_model_len")


def commands():
    return typer.main.get_command(app).commands


def invoke(*words, **env):
    return CliRunner().invoke(app, list(words), env={f"OUTRIDER_{name}": value for name, value in env.items()})


@pytest.mark.parametrize("name", SHARED)
def test_every_command_with_the_option_has_its_variable(name):
    found = {}
    for command, entry in commands().items():
        for parameter in getattr(entry, "params", ()):
            if parameter.name == name:
                found[command] = parameter.envvar
    assert found
    variable = f"OUTRIDER_{name.upper()}"
    assert found == {command: None if command in ESTIMATES else variable for command in found}


def test_help_shows_the_variable():
    assert "OUTRIDER_PORT" in CliRunner().invoke(app, ["serve", "--help"]).output


def test_variables_set_options_and_the_command_line_wins():
    words = ("run", "--max-tokens", "2", "--threads", "1", "--show", "--json", "--dtype", "float32", "a")
    result = invoke(*words, TARGET=NANO, PROPOSER="none")
    assert result.exit_code == 0, result.output
    assert "proposer none" in result.stderr
    assert "proposer ngram" in invoke(*words, "--proposer", "ngram", TARGET=NANO, PROPOSER="none").stderr


def test_a_configuration_wins_over_variables(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"target": NANO, "proposer": "none"}))
    words = ("run", "--config", str(tmp_path / "config.json"), "--max-tokens", "2", "--show", "a")
    result = invoke(*words, TARGET="/no/such/model", PROPOSER="ngram")
    assert result.exit_code == 0, result.output
    assert "proposer none" in result.stderr


def test_variables_are_not_options_that_another_one_refuses():
    result = invoke("audit", "--server", "http://127.0.0.1:9", PROPOSER="ngram")
    assert "--proposer" not in result.output


def test_a_wrong_value_names_its_variable():
    """Kubernetes sets such a value for a service that is called outrider."""
    result = invoke("serve", PORT="tcp://10.0.0.1:8000")
    assert result.exit_code == 2
    assert "OUTRIDER_PORT is 'tcp://10.0.0.1:8000'; use a whole number" in result.stderr


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("bash", {"COMP_WORDS": "outrider ser", "COMP_CWORD": "1"}, "serve"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "outrider serve --draft-w"}, "--draft-window"),
        ("fish", {"_TYPER_COMPLETE_ARGS": "outrider run --sys", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "--system"),
    ],
)
def test_completion(shell, words, expected):
    code = "import sys; sys.argv = ['outrider']; from outrider.cli.app import main; main()"
    env = {**os.environ, "_OUTRIDER_COMPLETE": f"complete_{shell}", **words}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert expected in done.stdout, done.stderr
