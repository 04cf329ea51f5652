"""The command `outrider bench`: run a measurement, print it, and write its report."""

from __future__ import annotations

from functools import partial

import typer
from rich.console import Console

from outrider.lab.bench.calibration import run_calibration, show_calibration
from outrider.lab.bench.html import page
from outrider.lab.bench.run import load, run_bench
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.table import show
from outrider.lab.bench.variants import SwitchPlanner
from outrider.runtime.ranks import is_first_rank
from outrider.runtime.report.console import Document, print_document
from outrider.runtime.report.page import check_report, write_report


def calibrate(settings: Settings, *, as_json: bool) -> None:
    """Measure the time of passes and print it."""
    document = run_calibration(load(settings, SwitchPlanner()))
    print_document(document, show_calibration, as_json=as_json)


def measure(settings: Settings, *, as_json: bool) -> None:
    """Measure speculation, print the results, and write the HTML report if there is to be one."""
    report = settings.report
    if report:
        check_report(report)  # before the measurement rather than after it
    document = run_bench(settings, progress=Console(stderr=True))
    print_document(document, show, as_json=as_json, write=partial(_write, report) if report else None)


def _write(report: str, document: Document) -> None:
    if not is_first_rank():
        return
    write_report(page(document), report)
    typer.echo(f"the report is in {report}", err=True)
