"""The README is true: its Python runs, its commands have the options that it shows, its links exist."""

import re
import shlex

import pytest
from typer.main import get_command

from outrider.cli.app import app
from tests.helpers import source

README = (source.ROOT / "README.md").read_text("utf-8")
COMMANDS = re.findall(r"^\$ (outrider .*)$", README, re.MULTILINE)


def test_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_have_their_options(line):
    _, verb, *words = shlex.split(line)
    command = get_command(app).commands[verb]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_links_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (source.ROOT / link).exists()]


def test_the_demo_is_the_one_of_the_makefile():
    makefile = (source.ROOT / "Makefile").read_text("utf-8")
    (demo,) = re.findall(r"\$\(BIN\)/(outrider run .*)", makefile)
    assert demo in COMMANDS
