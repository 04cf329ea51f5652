"""Runs a recipe in the process of the tests."""

from typer import Typer
from typer.testing import CliRunner


def run_recipe(command, *words):
    """Run the function of a command with words of the command line."""
    app = Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, words)))
