"""Prints the figures and the recommendation of `outrider tune`."""

from rich.console import Console
from rich.table import Table

from outrider.drafting.propose.expression import short
from outrider.lab.common.trial import label
from outrider.runtime.report.console import NONE, Document, new_table, print_plain

_MAX_POSITIONS = 6  # positions whose acceptance is printed
_LEFT_COLUMNS = ("proposer", "accepted, %")
_COLUMNS = ("batch", "T", "proposer", "k", "overall", "decoding", "tau", "accepted, %", "draft", "target", "host")


def show(document: Document, console: Console) -> None:
    """Print all cases, the tokens per pass of each proposer by category and output third, and the summary."""
    console.print(_cases(document))
    console.print(_texts(document))
    for line in document["summary"]:
        print_plain(console, f"- {line}")


def _cases(document: Document) -> Table:
    table = new_table(
        "Tokens/s over plain decoding: overall with its 95% interval, and of decoding alone; ms per round"
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT_COLUMNS else "right", no_wrap=True)
    for plain in document["plain"]:
        table.add_section()
        condition = (str(plain["batch"]), f"{plain['temperature']:g}")
        rate = NONE if plain["tokens_per_s"] is None else f"{plain['tokens_per_s']:.0f} t/s"
        prefill = f"prefill {plain['prefill_share']:.0%}"
        table.add_row(*condition, "plain", "0", prefill, rate, "1.00", "", *_parts(plain))
        for case in _cases_at(document, plain):
            decoding = f"{case['speedup']['value']:.2f}" if case["speedup"] else NONE
            total = case["total"]
            acceptance = " ".join(f"{100 * share:.0f}" for share in total["acceptance"][:_MAX_POSITIONS])
            figures = (_estimate(case["overall"]), decoding, f"{total['tau']:.2f}", acceptance, *_parts(case))
            table.add_row(*condition, _name(case), str(case["k"]), *figures)
    return table


def _texts(document: Document) -> Table:
    """Return tokens per pass by category and by output third, with the best k of each proposer.

    They are those of the first batch size and the first temperature.
    """
    plain = document["plain"][0]
    best: dict[str, Document] = {}
    for case in _cases_at(document, plain):
        best_so_far = best.setdefault(case["proposer"], case)
        if case["overall"]["value"] > best_so_far["overall"]["value"]:
            best[case["proposer"]] = case
    table = new_table(
        f"Tokens per pass at batch {plain['batch']}, T {plain['temperature']:g}, by category and output third"
    )
    table.add_column("", no_wrap=True)
    for case in best.values():
        table.add_column(f"{_name(case)}, k {case['k']}", justify="right")
    for part in ("categories", "output_thirds"):
        table.add_section()
        for name in next(iter(best.values()))[part]:
            table.add_row(name, *(f"{case[part][name]['tau']:.2f}" for case in best.values()))
    return table


def _cases_at(document: Document, plain: Document) -> list[Document]:
    """Return the cases with the batch and the temperature of `plain`."""
    key = (plain["batch"], plain["temperature"])
    return [case for case in document["cases"] if (case["batch"], case["temperature"]) == key]


def _name(case: Document) -> str:
    return label(short(case["proposer"]), case["draft_quantize"])


def _parts(entry: Document) -> tuple[str, ...]:
    return tuple(f"{entry['parts'][name]:.2f}" for name in ("draft", "target", "host"))


def _estimate(estimate: dict[str, float | None]) -> str:
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} [dim]{estimate['low']:.2f}–{estimate['high']:.2f}[/dim]"
