"""Both sides beside each other: by category, over all, and where the texts are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from shared import Completed, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt, completed by both."""

    category: str
    ours: Completed
    theirs: Completed

    @property
    def same(self) -> bool:
        """Whether both came to the same tokens."""
        return self.ours.tokens == self.theirs.tokens


def figures(pairs: Sequence[Pair], tolerance: float) -> dict[str, Any]:
    """What is reported of them. Where two texts part, guesses are checked against different ones from then on."""
    overall = _row(pairs)
    return {
        "categories": {
            category: _row([pair for pair in pairs if pair.category == category])
            for category in dict.fromkeys(pair.category for pair in pairs)
        },
        "overall": overall,
        "same_text": _row([pair for pair in pairs if pair.same]),
        "agree": overall["vllm"]["rounds"] > 0 and abs(overall["difference"]) <= tolerance,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The table for people."""
    ways = f"{report['method']}, {report['format'] or 'as it is'}, k {report['arguments']['k']}"
    table = Table(title=f"mean acceptance length ({ways}, {report['arguments']['dtype']})")
    table.add_column("category")
    for column in ("prompts", "same text", "rounds", "in vLLM", "length", "in vLLM", "difference"):
        table.add_column(column, justify="right")
    for name, row in report["categories"].items():
        table.add_row(name, *_cells(row))
    table.add_section()
    table.add_row("overall", *_cells(report["overall"]))
    table.add_row("same text", *_cells(report["same_text"]))
    console.print(table)
    for side in ("outrider", "vllm"):
        row = report["overall"][side]
        kept = ", ".join(f"{each / row['rounds']:.3f}" for each in row["accepted"]) if row["rounds"] else "none"
        console.print(f"kept by position, {side}: {kept}", highlight=False)
    same = report["same_text"]
    console.print(
        f"{same['same_counts']} of {same['prompts']} equal texts were made in the same rounds", highlight=False
    )


def _row(pairs: Sequence[Pair]) -> dict[str, Any]:
    ours, theirs = total([pair.ours.counts for pair in pairs]), total([pair.theirs.counts for pair in pairs])
    return {
        "prompts": len(pairs),
        "same_text": sum(pair.same for pair in pairs),
        "same_counts": sum(pair.ours.counts == pair.theirs.counts for pair in pairs),
        "outrider": ours.to_json(),
        "vllm": theirs.to_json(),
        "difference": theirs.length / ours.length - 1,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["outrider"], row["vllm"]
    rounds = [str(each["rounds"]) for each in (ours, theirs)]
    lengths = [f"{each['length']:.3f}" for each in (ours, theirs)]
    return [str(row["prompts"]), str(row["same_text"]), *rounds, *lengths, f"{row['difference']:+.1%}"]
