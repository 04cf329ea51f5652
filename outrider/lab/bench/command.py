"""The command `outrider bench`: run a measurement, print it, and write its report."""

from functools import partial

from rich.console import Console

from outrider.lab.bench.calibration import run_calibration, show_calibration
from outrider.lab.bench.ceiling import run_ceiling, show_ceiling
from outrider.lab.bench.run import load, run_bench
from outrider.lab.bench.scaling import run_scaling, show_scaling
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.table import show
from outrider.runtime.ranks import is_first_rank
from outrider.runtime.report.console import Document, print_document
from outrider.runtime.report.page import check_report, write_report


def calibrate(settings: Settings, *, as_json: bool) -> None:
    """Measure the time of passes and print it."""
    print_document(run_calibration(load(settings)), show_calibration, as_json=as_json)


def scale(settings: Settings, *, as_json: bool) -> None:
    """Measure the time of passes by the number of threads and print it."""
    print_document(run_scaling(settings), show_scaling, as_json=as_json)


def replay(settings: Settings, *, as_json: bool) -> None:
    """Measure replayed drafts and print their speedups."""
    print_document(run_ceiling(settings), show_ceiling, as_json=as_json)


def measure(settings: Settings, *, as_json: bool) -> None:
    """Measure speculation, print the results, and write the report of --report."""
    report = settings.report
    if report:
        check_report(report)  # here, so that a mistake is reported before the measurement
    result = run_bench(settings, progress=Console(stderr=True))

    def tables(_: Document, console: Console) -> None:
        show(result, console)

    write = partial(write_report, show=tables, file=report) if report and is_first_rank() else None
    print_document(result.as_dict(), tables, as_json=as_json, write=write)
