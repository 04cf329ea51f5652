"""Runs `outrider media` for the tests."""

import json

from typer.testing import CliRunner

from outrider.cli.app import app


def run(*words):
    """Run a command of `outrider media`."""
    return CliRunner().invoke(app, ["media", *map(str, words)])


def document(result):
    """Return the JSON document of a command that has succeeded."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])
