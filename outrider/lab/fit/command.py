"""The command `outrider fit`, as a terminal shows it."""

from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from outrider.drafting.propose.expression import short
from outrider.lab.common.records import from_json
from outrider.lab.fit.drafts import DraftFigures
from outrider.lab.fit.option import Option
from outrider.lab.fit.run import Fit
from outrider.lab.fit.settings import Settings
from outrider.runtime.report.console import INTERRUPTED, Document, bytes_text, new_table, print_document, print_plain


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
            memory = bytes_text(option.memory_bytes) if option.memory_bytes else "no weights"
        table.add_row(option.name, *speeds, taus, memory, option.verdict)
    console.print(table)
    if document["fit"]["drafts"]:
        console.print(_drafts([from_json(DraftFigures, each) for each in document["fit"]["drafts"]]))
    for line in document["fit"]["summary"]:
        print_plain(console, line)


def _drafts(drafts: Sequence[DraftFigures]) -> Table:
    table = new_table("Draft models of the first measurement: mean over the temperatures, and what a draft token takes")
    table.add_column("draft", overflow="fold")
    for name in ("weights", "memory", "ms per draft token", "tau", "acceptance", "k", "speedup"):
        table.add_column(name, justify="left" if name == "weights" else "right")
    for each in drafts:
        table.add_row(
            short(each.proposer),
            each.draft_quantize or "as stored",
            bytes_text(each.memory_bytes),
            f"{each.token_ms:.2f}",
            f"{each.tau:.2f}",
            f"{each.acceptance:.0%}",
            str(each.k),
            each.speedup.text,
        )
    return table
