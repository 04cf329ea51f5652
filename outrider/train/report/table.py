"""Prints the results of a training as a table."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


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
