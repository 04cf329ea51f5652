"""Runs the command `train` and prints its results."""

from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.runtime.processes import rank
from outrider.runtime.report.console import print_document
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
    """Tell the user that the state file remains. It is larger than the draft."""
    file = Path(settings.out).expanduser() / STATE
    if file.is_file():
        use = "more --max-minutes continue from it" if settings.max_minutes is not None else "it is only for resuming"
        typer.echo(f"{file} ({file.stat().st_size / 1e6:.0f} MB) stays: {use}; delete it if you are done", err=True)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the document that `Training.run` returned."""
    console.print(_title(document), markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("evaluation prompts", "tau", "accepted by position, %"):
        table.add_column(name, justify="left")
    for name, result in document["evaluation"].items():
        acceptance = " ".join(f"{100 * rate:.0f}" for rate in result["acceptance"])
        table.add_row(name, f"{result['tau']:.2f}", acceptance)
    console.print(table)
    target_option = f" and --target {document['trained_target']}" if document["trained_target"] else ""
    console.print(f"Use it with --proposer draft:{document['out']}{target_option}.", markup=False, soft_wrap=True)


def _title(document: dict[str, Any]) -> str:
    millions = document["parameters"] / 1e6
    minutes = document["seconds"] / 60
    return (
        f"{document['kind']} for {document['target']}: {millions:.1f}M parameters,"
        f" {document['steps']} steps, {minutes:.1f} minutes; k = {document['k']}"
    )
