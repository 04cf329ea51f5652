"""The verb `bench`, as a terminal sees it."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from outrider.bench.calibration import run_calibration, show_calibration
from outrider.bench.contest import SwitchPlanner
from outrider.bench.html import page
from outrider.bench.run import load, run_bench
from outrider.bench.settings import Settings
from outrider.bench.table import show
from outrider.page import check_report, write_report

_FILE_WIDTH = 120  # columns of tables where no terminal sets them


def calibrate(settings: Settings, *, as_json: bool) -> None:
    """Measure what passes cost, and print it."""
    people = Console()
    document = run_calibration(load(settings, SwitchPlanner()), progress=Console(stderr=True))
    show_calibration(document, people)
    if as_json or not people.is_terminal:
        typer.echo(json.dumps(document))


def measure(settings: Settings, *, report: str | None, as_json: bool) -> None:
    """Measure speculation, print it, and write the page that is asked for."""
    if report:
        check_report(report)  # before the measurement rather than after it
    people = Console()
    if not people.is_terminal:
        people.width = _FILE_WIDTH
    document = run_bench(settings, progress=Console(stderr=True))
    show(document, people)
    if report:
        write_report(page(document), report)
        typer.echo(f"the report is in {report}", err=True)
    if as_json or not people.is_terminal:
        typer.echo(json.dumps(document))
