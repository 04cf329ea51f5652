"""Writes what a command prints as one HTML page, without scripts or external resources."""

import io
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import check_writable, write_whole
from outrider.runtime.report.console import FILE_WIDTH, Document

_SUFFIXES = (".html", ".htm")


def check_report(file: str | Path) -> None:
    """Check before a measurement that its report can be written.

    Raises:
        OutriderError: the file cannot be written or has another suffix than .html.
    """
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OutriderError(f"--report {file} is not a file in an existing folder; use for example report.html")
    if path.suffix not in _SUFFIXES:
        raise OutriderError(f"--report {file} has another suffix than .html; use for example report.html")
    check_writable(path)


def write_report(document: Document, show: Callable[[Document, Console], None], file: str | Path) -> None:
    """Write a page with the tables of a document, and below them the document as JSON.

    Args:
        show: prints the tables.

    Raises:
        OutriderError: the file cannot be written.
    """
    console = Console(file=io.StringIO(), record=True, width=FILE_WIDTH)
    show(document, console)
    console.print_json(data=document)
    write_whole(Path(file).expanduser(), console.export_html())
    typer.echo(f"the report is in {file}", err=True)
