"""What came of a training, for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(document: dict[str, Any], console: Console) -> None:
    """Print what `Training.run` returned."""
    console.print(_title(document), markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("held-out prompts", "tau", "accepted by position, %"):
        table.add_column(name, justify="left")
    for name, each in document["held_out"].items():
        kept = " ".join(f"{100 * share:.0f}" for share in each["acceptance"])
        table.add_row(name, f"{each['tau']:.2f}", kept)
    console.print(table)
    taught = f" and --target {document['taught_target']}" if document["taught_target"] else ""
    console.print(f"Use it with --proposer draft:{document['out']}{taught}.", markup=False, soft_wrap=True)


def _title(document: dict[str, Any]) -> str:
    millions, minutes = document["parameters"] / 1e6, document["seconds"] / 60
    return (
        f"{document['kind']} for {document['target']}: {millions:.1f}M parameters, {document['steps']} steps,"
        f" {minutes:.1f} minutes; k = {document['k']}"
    )
