"""The answer and what stands behind it, as people read them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from outrider.propose.expression import short
from outrider.report.console import NONE, Document, titled

_SHOWN = 6  # positions


def show(document: Document, console: Console) -> None:
    """Print every way to decode, the guesses of each proposer by kind of text, and then the answer."""
    console.print(_cases(document))
    console.print(_texts(document))
    for line in document["summary"]:
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)


def _cases(document: Document) -> Table:
    table = titled("Tokens/s over plain decoding: overall with its 95% interval, and of decoding alone; ms of a round")
    for name in ("batch", "T", "proposer", "k", "overall", "decoding", "tau", "kept, %", "draft", "target", "host"):
        table.add_column(name, justify="left" if name in ("proposer", "kept, %") else "right", no_wrap=True)
    for plain in document["plain"]:
        table.add_section()
        place = (str(plain["batch"]), f"{plain['temperature']:g}")
        rate = NONE if plain["tokens_per_s"] is None else f"{plain['tokens_per_s']:.0f} t/s"
        table.add_row(*place, "plain", "0", f"prefill {plain['prefill_share']:.0%}", rate, "1.00", "", *_parts(plain))
        for case in document["cases"]:
            if (case["batch"], case["temperature"]) != (plain["batch"], plain["temperature"]):
                continue
            decoding = f"{case['speedup']['value']:.2f}" if case["speedup"] else NONE
            kept = case["total"]
            shares = " ".join(f"{100 * share:.0f}" for share in kept["acceptance"][:_SHOWN])
            numbers = (_estimate(case["overall"]), decoding, f"{kept['tau']:.2f}", shares, *_parts(case))
            table.add_row(*place, short(case["proposer"]), str(case["k"]), *numbers)
    return table


def _texts(document: Document) -> Table:
    """At the first place, tokens a pass by category and by third of the output, with each proposer's best k."""
    home = document["plain"][0]
    best: dict[str, Document] = {}
    for case in document["cases"]:
        if (case["batch"], case["temperature"]) == (home["batch"], home["temperature"]):
            known = best.setdefault(case["proposer"], case)
            if case["overall"]["value"] > known["overall"]["value"]:
                best[case["proposer"]] = case
    title = f"Tokens a pass at batch {home['batch']}, T {home['temperature']:g}, by kind of text and third of output"
    table = titled(title)
    table.add_column("", no_wrap=True)
    for proposer, case in best.items():
        table.add_column(f"{short(proposer)}, k {case['k']}", justify="right")
    for part in ("categories", "output_thirds"):
        table.add_section()
        for name in next(iter(best.values()))[part]:
            table.add_row(name, *(f"{case[part][name]['tau']:.2f}" for case in best.values()))
    return table


def _parts(entry: Document) -> tuple[str, ...]:
    return tuple(f"{entry['parts'][name]:.2f}" for name in ("draft", "target", "host"))


def _estimate(estimate: dict[str, float | None]) -> str:
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} [dim]{estimate['low']:.2f}–{estimate['high']:.2f}[/dim]"
