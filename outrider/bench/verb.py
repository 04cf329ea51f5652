"""The verb `bench`, as a terminal sees it."""

from __future__ import annotations

import typer
from rich.console import Console

from outrider.bench.calibration import run_calibration, show_calibration
from outrider.bench.contest import SwitchPlanner
from outrider.bench.html import page
from outrider.bench.run import load, run_bench
from outrider.bench.settings import Settings
from outrider.bench.table import show
from outrider.console import end, standard_output
from outrider.page import check_report, write_report


def calibrate(settings: Settings, *, as_json: bool) -> None:
    """Measure what passes cost, and print it."""
    people = standard_output()
    document = run_calibration(load(settings, SwitchPlanner()), progress=Console(stderr=True))
    show_calibration(document, people)
    end(people, document, as_json=as_json)


def measure(settings: Settings, *, report: str | None, as_json: bool) -> None:
    """Measure speculation, print it, and write the page that is asked for."""
    if report:
        check_report(report)  # before the measurement rather than after it
    people = standard_output()
    document = run_bench(settings, progress=Console(stderr=True))
    show(document, people)
    if report:
        write_report(page(document), report)
        typer.echo(f"the report is in {report}", err=True)
    end(people, document, as_json=as_json)
