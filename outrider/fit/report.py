"""Print the outcome of a fit."""

from __future__ import annotations

from rich.console import Console

from outrider.fit.outcome import Option, size
from outrider.report.console import Document, new_table


def show(document: Document, console: Console) -> None:
    """Print a table of all options, and the choice in words."""
    table = new_table("What each option brings: tokens/s over plain decoding with its 95% interval, and memory")
    for name in ("option", "speedup", "tokens per pass", "memory of the draft", "verdict"):
        table.add_column(name, justify="right" if name == "tokens per pass" else "left")
    options = [Option(**each) for each in document["fit"]["options"]]
    plain = document["plain"][0]["tokens_per_s"]
    for option in options:
        is_plain = option.proposer == "none"
        speed = f"1.00, {plain:.0f} tokens/s" if is_plain and plain else option.interval
        memory = "" if is_plain else size(option.memory_bytes) if option.memory_bytes else "no weights"
        table.add_row(option.name, speed, f"{option.tau:.2f}", memory, option.verdict)
    console.print(table)
    for line in document["fit"]["summary"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
