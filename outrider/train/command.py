"""Runs the command `train` and prints its results."""

from pathlib import Path

import typer

from outrider.runtime.processes import rank
from outrider.runtime.report.console import print_document
from outrider.train.report.table import show
from outrider.train.run import Training
from outrider.train.settings import Settings
from outrider.train.trainer import STATE


def train(kind: str, settings: Settings, *, as_json: bool) -> None:
    """Train, and print the results. In a distributed training only the process of rank 0 prints."""
    document, _ = Training(kind, settings).run()
    if not rank():
        print_document(document, show, as_json=as_json)
        _tell_state(settings)


def _tell_state(settings: Settings) -> None:
    """Say that the state stays, which is larger than the draft."""
    file = Path(settings.out).expanduser() / STATE
    if file.is_file():
        use = "more --max-minutes continue from it" if settings.max_minutes is not None else "it is only for resuming"
        typer.echo(f"{file} ({file.stat().st_size / 1e6:.0f} MB) stays: {use}; delete it if you are done", err=True)
