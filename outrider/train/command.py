"""The verb `train`, as a terminal sees it."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from rich.console import Console

from outrider.report.console import Document, print_document
from outrider.report.page import check_report, write_report
from outrider.train.distributed import rank
from outrider.train.report.html import page
from outrider.train.report.table import show
from outrider.train.run import Training
from outrider.train.settings import Settings


def train(kind: str, settings: Settings, *, as_json: bool) -> None:
    """Train, print what came of it, and write the page that is asked for; of several processes one speaks."""
    if settings.report:
        check_report(settings.report)  # before the training rather than after it
    document, lines = Training(kind, settings).run(Console(stderr=True, quiet=bool(rank())))
    if rank():
        return
    keep = partial(_write, settings.report, lines) if settings.report else None
    print_document(document, show, as_json=as_json, keep=keep)


def _write(report: str, lines: list[dict[str, Any]], document: Document) -> None:
    write_report(page(document, lines), report)
    typer.echo(f"the report is in {report}", err=True)
