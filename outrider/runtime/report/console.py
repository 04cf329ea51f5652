"""Prints the results of a command: tables, then one JSON document as the last line."""

import json
from collections.abc import Callable
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it
NONE = "–"  # printed in place of a missing number
FILE_WIDTH = 160  # columns of tables if the output is not a terminal

Document = dict[str, Any]


def standard_output() -> Console:
    """Return a console for tables on standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def new_table(title: str) -> Table:
    """Return an empty table in the common style."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))


def print_plain(console: Console, text: str) -> None:
    """Print a line as it is: without colors, markup and wrapping, so that paths and names can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def count_text(count: int, noun: str) -> str:
    """Return the count and the noun: 1 round, 2 rounds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def bytes_text(size: float) -> str:
    """Return a number of bytes in words: 1.5 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def print_document(
    document: Document,
    show: Callable[[Document, Console], None],
    *,
    as_json: bool,
    write: Callable[[Document], None] | None = None,
) -> None:
    """Write the files of a document, print its tables, and print it as JSON.

    If one of these steps fails, the JSON document is printed all the same, so that a long measurement is not lost.

    Args:
        show: prints the tables.
        as_json: print the JSON document on a terminal, too.
        write: writes the files. It runs first, because files do not depend on the output.

    Raises:
        OutriderError: a file could not be written. The document has been printed.
    """
    console = standard_output()
    try:
        if write is not None:
            write(document)
        show(document, console)
    except OutriderError as error:
        _print(document)
        raise OutriderError(f"{error}. The results are not lost: standard output has the JSON document") from None
    except Exception:
        _print(document)
        raise
    end(console, document, as_json=as_json)


def end(console: Console, document: Document, *, as_json: bool) -> None:
    """Print the JSON document after the tables, if the output is not a terminal or `as_json` is set."""
    if as_json or not console.is_terminal:
        _print(document)


def _print(document: Document) -> None:
    typer.echo(json.dumps(document))
