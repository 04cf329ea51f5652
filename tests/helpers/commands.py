"""Commands of `outrider` that run in the process of the test."""

import json

from typer.testing import CliRunner

from outrider.cli.app import app


def invoke(*words, **options):
    """Run a command, and return its result."""
    return CliRunner().invoke(app, [*map(str, words)], **options)


def succeed(*words, **options):
    """Run a command that must succeed, and return its result."""
    result = invoke(*words, **options)
    assert result.exit_code == 0, result.output
    return result


def document(*words, **options):
    """Run a command that must succeed, and return the JSON document of its last line."""
    return json.loads(succeed(*words, **options).stdout.splitlines()[-1])


def refuse(*words, **options):
    """Run a command that must end with a mistake of the user, and return its output as one line."""
    result = invoke(*words, **options)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())
