"""Runs `outrider media` for the tests."""

import json

from tests.helpers.commands import invoke


def run(*words):
    """Run a command of `outrider media`."""
    return invoke("media", *words)


def document(result):
    """Return the JSON document of a command that has succeeded."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])
