"""Run `outrider project`."""

import json

from tests.helpers.commands import invoke

OPTIONS = ("--target", "8B", "--machine", "h100", "--alpha", "0.8")


def project(*words):
    """Return the result of the command."""
    return invoke("project", *words)


def projected(*words):
    """Return the JSON document and the whole output."""
    result = project(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), result.stdout
