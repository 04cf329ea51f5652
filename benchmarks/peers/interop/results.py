"""Compares the results of both engines for a draft: by category, overall, and for prompts with equal completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from shared import Completed, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt, completed by both engines."""

    category: str
    outrider: Completed
    vllm: Completed

    @property
    def same(self) -> bool:
        """Whether both completions have the same tokens."""
        return self.outrider.tokens == self.vllm.tokens


def figures(pairs: Sequence[Pair], tolerance: float) -> dict[str, Any]:
    """Return the figures for the document.

    Once two completions differ, draft tokens are verified against different tokens, so their counts may differ too.
    """
    overall = _summary(pairs)
    return {
        "categories": {
            category: _summary([pair for pair in pairs if pair.category == category])
            for category in dict.fromkeys(pair.category for pair in pairs)
        },
        "overall": overall,
        "same_text": _summary([pair for pair in pairs if pair.same]),
        "agree": overall["vllm"]["rounds"] > 0 and abs(overall["difference"]) <= tolerance,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the table."""
    arguments = report["arguments"]
    table = Table(title=f"mean acceptance length, k {arguments['k']}, {arguments['dtype']}")
    for column in ("draft", "kind"):
        table.add_column(column)
    for column in ("prompts", "same text", "rounds", "in vLLM", "length", "in vLLM", "difference"):
        table.add_column(column, justify="right")
    for each in report["drafts"]:
        cells = ["vLLM has failed"] if "error" in each else _cells(each["overall"])
        table.add_row(each["draft"], each["kind"], *cells)
    console.print(table)
    for each in report["drafts"]:
        if "error" not in each:
            _show_positions(each, console)


def _show_positions(draft: dict[str, Any], console: Console) -> None:
    for engine in ("outrider", "vllm"):
        counts = draft["overall"][engine]
        rates = ", ".join(f"{count / counts['rounds']:.3f}" for count in counts["accepted"]) if counts["rounds"] else ""
        line = f"{draft['draft']}, accepted by position, {engine}: {rates or 'none'}"
        console.print(line, highlight=False, soft_wrap=True)
    same = draft["same_text"]
    console.print(f"{same['same_counts']} of {same['prompts']} equal completions took the same rounds", highlight=False)


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    outrider = total([pair.outrider.counts for pair in pairs])
    vllm = total([pair.vllm.counts for pair in pairs])
    return {
        "prompts": len(pairs),
        "same_text": sum(pair.same for pair in pairs),
        "same_counts": sum(pair.outrider.counts == pair.vllm.counts for pair in pairs),
        "outrider": outrider.to_json(),
        "vllm": vllm.to_json(),
        "difference": vllm.length / outrider.length - 1,
    }


def _cells(summary: dict[str, Any]) -> list[str]:
    both = (summary["outrider"], summary["vllm"])
    rounds = [str(counts["rounds"]) for counts in both]
    lengths = [f"{counts['length']:.3f}" for counts in both]
    return [str(summary["prompts"]), str(summary["same_text"]), *rounds, *lengths, f"{summary['difference']:+.1%}"]
