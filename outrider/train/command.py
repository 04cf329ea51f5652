"""Runs the command `train` and prints its results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer

from outrider.runtime.processes import rank
from outrider.runtime.report.console import Document, print_document
from outrider.runtime.report.page import check_report, write_report
from outrider.train.report.html import page
from outrider.train.report.table import show
from outrider.train.run import Training
from outrider.train.settings import Settings
from outrider.train.trainer import STATE


def train(kind: str, settings: Settings, *, as_json: bool) -> None:
    """Train, print the results, and write the report if `settings` ask for one.

    In a distributed training only the process of rank 0 prints and writes.
    """
    if settings.report:
        check_report(settings.report)  # fail before the training, not after it
    document, lines = Training(kind, settings).run()
    if not rank():
        show_results(document, lines, settings.report, as_json=as_json)
        _tell_state(settings)


def _tell_state(settings: Settings) -> None:
    """Say that the state stays, which is larger than the draft."""
    file = Path(settings.out).expanduser() / STATE
    if file.is_file():
        use = "more --max-minutes continue from it" if settings.max_minutes is not None else "it is only for resuming"
        typer.echo(f"{file} ({file.stat().st_size / 1e6:.0f} MB) stays: {use}; delete it if you are done", err=True)


def show_results(document: Document, lines: list[dict[str, Any]], report: str | None, *, as_json: bool) -> None:
    """Print the results of a training, and write the report to a file if `report` is not None."""
    write_files = partial(_write_report, report, lines) if report else None
    print_document(document, show, as_json=as_json, write=write_files)


def _write_report(report: str, lines: list[dict[str, Any]], document: Document) -> None:
    write_report(page(document, lines), report)
    typer.echo(f"the report is in {report}", err=True)
