"""The command `outrider tune`: a measurement of models, or of a running server."""

from functools import partial
from pathlib import Path

from rich.console import Console

from outrider.lab.tune.run import run_tune, write
from outrider.lab.tune.server.run import run_server_tune
from outrider.lab.tune.server.run import show as show_server
from outrider.lab.tune.server.settings import ServerOptions
from outrider.lab.tune.settings import Settings
from outrider.lab.tune.table import show
from outrider.runtime.atomic_files import check_writable
from outrider.runtime.report.console import print_document


def tune(settings: Settings, *, as_json: bool) -> str:
    """Measure proposers, print the recommendation, and write it if there is a file for it.

    Returns:
        What is lost if the measurement was interrupted; "": it was not.
    """
    out = settings.out
    if out:
        check_writable(out)  # here, so that a mistake is reported before the measurement
    runs = Path(f"{out}.runs").expanduser() if out else None
    document = run_tune(settings, progress=Console(stderr=True), file=runs)
    print_document(document, show, as_json=as_json, write=partial(write, file=out) if out else None)
    if document["complete"]:
        return ""
    kept = f"its runs are in {runs}, and the same command continues" if runs else "with --out it could continue"
    return f"the measurement was interrupted; {kept}"


def tune_server(settings: Settings, server: ServerOptions, *, as_json: bool) -> None:
    """Measure a running server, and print what to set there."""
    document = run_server_tune(settings, server)
    print_document(document, show_server, as_json=as_json)
