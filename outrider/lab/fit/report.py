"""Print the outcome of a fit."""

from __future__ import annotations

from rich.console import Console

from outrider.lab.common.records import from_json
from outrider.lab.fit.option import Option, size
from outrider.runtime.report.console import Document, new_table


def show(document: Document, console: Console) -> None:
    """Print a table of all options, and the choice in words."""
    table = new_table("Speedup of each option over plain decoding with its 95% interval, and memory")
    table.add_column("option", overflow="fold")
    for plain in document["plain"]:
        table.add_column(f"speedup, T={plain['temperature']:g}")
    table.add_column("tokens per pass", justify="right")
    for name in ("memory of the draft", "verdict"):
        table.add_column(name)
    rates = [plain["tokens_per_s"] for plain in document["plain"]]
    for option in (from_json(Option, each) for each in document["fit"]["options"]):
        taus = ", ".join(f"{speed.tau:.2f}" for speed in option.by_temperature)
        if option.proposer == "none":
            speeds = [f"1.00, {rate:.0f} tokens/s" if rate else "1.00" for rate in rates]
            memory = ""
        else:
            speeds = [speed.interval for speed in option.by_temperature]
            memory = size(option.memory_bytes) if option.memory_bytes else "no weights"
        table.add_row(option.name, *speeds, taus, memory, option.verdict)
    console.print(table)
    for line in document["fit"]["summary"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
