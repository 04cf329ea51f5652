"""The command `outrider fit`, as a terminal shows it."""

import typer
from rich.console import Console

from outrider.lab.fit.report import show
from outrider.lab.fit.run import Fit
from outrider.lab.fit.settings import Settings
from outrider.runtime.report.console import INTERRUPTED, print_document


def fit(settings: Settings, *, as_json: bool) -> None:
    """Run a fit and print its outcome. Ctrl-C keeps the best configuration so far."""
    run = Fit(settings, Console(stderr=True))
    try:
        document = run.run()
    except KeyboardInterrupt:
        typer.echo(_interrupted(run), err=True)
        raise typer.Exit(INTERRUPTED) from None
    print_document(document, show, as_json=as_json, write=run.write)
    certificate = document["fit"]["certificate"]
    if certificate and certificate["passed"] is False:
        raise typer.Exit(1)


def _interrupted(run: Fit) -> str:
    if not run.started:
        return "interrupted in the first measurement. Its runs so far are kept; the same command continues."
    document = run.document()
    run.write(document)
    choice = document["fit"]["summary"][0]
    return f"interrupted. Best so far, in {run.config}: {choice}\nThe same command continues."
