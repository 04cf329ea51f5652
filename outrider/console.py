"""What verbs print: tables for people, and one JSON document as the last line."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

_FILE_WIDTH = 120  # columns of tables where no terminal sets them


def standard_output() -> Console:
    """For people."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def end(console: Console, document: dict[str, Any], *, as_json: bool) -> None:
    """Print the document behind what people read: into a file or a pipe always, on a terminal if it is asked for."""
    if as_json or not console.is_terminal:
        typer.echo(json.dumps(document))
