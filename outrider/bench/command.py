"""The command `outrider bench`: run a measurement, print it, and write its report."""

from __future__ import annotations

from functools import partial

import typer
from rich.console import Console

from outrider.bench.calibration import run_calibration, show_calibration
from outrider.bench.html import page
from outrider.bench.run import load, run_bench
from outrider.bench.settings import Settings
from outrider.bench.table import show
from outrider.bench.variants import SwitchPlanner
from outrider.parallel.ranks import is_first_rank
from outrider.report.console import Document, print_document
from outrider.report.page import check_report, write_report


def calibrate(settings: Settings, *, as_json: bool) -> None:
    """Measure the time of passes and print it."""
    document = run_calibration(load(settings, SwitchPlanner()), progress=Console(stderr=True))
    print_document(document, show_calibration, as_json=as_json)


def measure(settings: Settings, *, report: str | None, as_json: bool) -> None:
    """Measure speculation, print the results, and write the HTML report if `report` names a file."""
    if report:
        check_report(report)  # before the measurement rather than after it
    document = run_bench(settings, progress=Console(stderr=True))
    print_document(document, show, as_json=as_json, write=partial(_write, report) if report else None)


def _write(report: str, document: Document) -> None:
    if not is_first_rank():
        return
    write_report(page(document), report)
    typer.echo(f"the report is in {report}", err=True)
