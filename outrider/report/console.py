"""What verbs print: tables for people, and one JSON document as the last line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError

NONE = "–"  # where there is no figure
_FILE_WIDTH = 120  # columns of tables where no terminal sets them

Document = dict[str, Any]


def standard_output() -> Console:
    """For people."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def titled(title: str) -> Table:
    """An empty table with the look that all reports of figures have."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))


def counted(count: int, noun: str) -> str:
    """1 round, 2 rounds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_document(
    document: Document,
    show: Callable[[Document, Console], None],
    *,
    as_json: bool,
    keep: Callable[[Document], None] | None = None,
) -> None:
    """Keep a document in a file, show it to people, and print it; what took long to find is not lost if one fails.

    Args:
        document: what was found.
        show: prints it for people.
        as_json: print it on a terminal, too.
        keep: writes the files that were asked for; it goes first, because it can do without the others.

    Raises:
        OutriderError: a file could not be written; the document has been printed then.
    """
    people = standard_output()
    try:
        if keep is not None:
            keep(document)
        show(document, people)
    except OutriderError as error:
        _print(document)
        raise OutriderError(f"{error}. What was found is not lost: standard output has the document") from None
    except Exception:
        _print(document)
        raise
    end(people, document, as_json=as_json)


def end(console: Console, document: Document, *, as_json: bool) -> None:
    """Print the document behind what people read: into a file or a pipe always, on a terminal if it is asked for."""
    if as_json or not console.is_terminal:
        _print(document)


def _print(document: Document) -> None:
    typer.echo(json.dumps(document))
