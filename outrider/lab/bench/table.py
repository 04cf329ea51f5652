"""Prints the results of a benchmark as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.core.placement import describe_placement
from outrider.lab.bench.conditions import latency_text, median_text, memory, rates
from outrider.lab.bench.report import OVERALL, PLAIN, SPECULATIVE, summary
from outrider.runtime.report.console import NONE, new_table

_ROUND_PARTS = ("draft_ms", "target_ms", "host_ms")
_MAX_POSITIONS = 8  # positions whose acceptance is printed; the JSON document has all


def show(document: dict[str, Any], console: Console) -> None:
    """Print speed, latency, the time of a round, the sweeps, and the limits."""
    results = document["results"]
    console.print(summary(document).replace("(not exact)", "([red]not exact[/red])"), highlight=False)
    console.print(_speed(results))
    console.print(_time(results))
    for axis, entries in document["sweeps"].items():
        console.print(_sweep(axis, entries))
    machine = _list("This machine, before and after", rates(document))
    for placement in document["draft_placements"]:
        console.print(describe_placement(placement), highlight=False, markup=False)
    for line in (*_notes(document), machine, _limits(document), _list("Memory", memory(document))):
        console.print(line, highlight=False)


def _speed(results: dict[str, Any]) -> Table:
    peers = [name for name in results[OVERALL] if name not in (PLAIN, SPECULATIVE)]
    table = new_table("Decoding, tokens/s, and acceptance by position")
    table.add_column("category", no_wrap=True)
    for name in (PLAIN, SPECULATIVE, *peers):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("tau", justify="right", no_wrap=True)
    table.add_column("accepted, %")  # the one column that wraps on a narrow terminal
    for category, figures in results.items():
        _add_section_before_overall(table, category)
        speculative = figures[SPECULATIVE]
        rates = [median_text(figures[name]["tokens_per_s"]) for name in (PLAIN, SPECULATIVE, *peers)]
        shares = speculative["acceptance_by_position"][:_MAX_POSITIONS]
        acceptance = " ".join(f"{100 * share:.0f}" for share in shares)
        table.add_row(category, *rates, _spread(speculative["speedup"], ".2f"), f"{speculative['tau']:.2f}", acceptance)
    return table


def _time(results: dict[str, Any]) -> Table:
    table = new_table("Milliseconds between tokens (p50 p95 p99), and of the parts of a round")
    table.add_column("category", no_wrap=True)
    for name in ("plain", "speculative", "plain round", "draft", "target", "host"):
        table.add_column(name, justify="right", no_wrap=name != "plain round")
    for category, figures in results.items():
        _add_section_before_overall(table, category)
        plain = figures[PLAIN]
        speculative = figures[SPECULATIVE]
        plain_round = sum(plain[part] for part in _ROUND_PARTS)
        table.add_row(
            category,
            latency_text(plain["latency_ms"]),
            latency_text(speculative["latency_ms"]),
            f"{plain_round:.2f}",
            *(f"{speculative[part]:.2f}" for part in _ROUND_PARTS),
        )
    return table


def _sweep(axis: str, entries: list[dict[str, Any]]) -> Table:
    table = new_table(
        f"Against {axis}, over all categories; tokens/s, and the shares of the limits, plain and speculative"
    )
    for name in (axis, "plain", "speculative", "speedup", "tau", "p50 p95 p99, ms", "% of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        plain = entry[PLAIN]
        speculative = entry[SPECULATIVE]
        limits = entry["limits"]
        table.add_row(
            f"{entry['value']:g}",
            _spread(plain["tokens_per_s"], ".0f"),
            _spread(speculative["tokens_per_s"], ".0f"),
            _spread(speculative["speedup"], ".2f"),
            f"{speculative['tau']:.2f}",
            latency_text(speculative["latency_ms"]),
            " ".join(_percent(limits[name]["share_of_limit"]) for name in (PLAIN, SPECULATIVE)),
        )
    return table


def _notes(document: dict[str, Any]) -> list[str]:
    overall = document["results"][OVERALL]
    rates = [f"{name} {_spread(overall[name]['tokens_per_s'], '.0f')}" for name in overall]
    lines = [f"Overall tokens/s, median and range over repeats: {', '.join(rates)}."]
    measured = overall[SPECULATIVE]["speedup"]
    expected = overall[SPECULATIVE]["expected_speedup"]
    if measured and expected:
        lines.append(
            f"Speedup [bold]{measured['median']:.2f}[/bold]; {expected:.2f} expected from the measured acceptance and"
            " the measured costs of a round (Leviathan et al. 2023, theorem 3.8)."
        )
    lines.append(
        "Speed counts decoding only, from the first token of a completion to its last. The tokens of one round arrive"
        " together: the first one waits for the whole round, the others do not wait."
    )
    return lines


def _limits(document: dict[str, Any]) -> str:
    limits = document["limits"]
    plain = limits[PLAIN]
    speculative = limits[SPECULATIVE]
    return (
        f"Plain decoding reads {limits['bytes_per_token'] / 1e6:.1f} MB per token, which limits it to"
        f" {plain['limit_tokens_per_s']:.0f} tokens/s; it reaches {_percent(plain['share_of_limit'])}% of that. With"
        f" the tau of speculation the limit is {speculative['limit_tokens_per_s']:.0f} tokens/s; speculation reaches"
        f" {_percent(speculative['share_of_limit'])}% of that."
    )


def _list(title: str, pairs: list[tuple[str, str]]) -> str:
    return f"{title}: " + "; ".join(f"{name} {text}" for name, text in pairs) + "."


def _add_section_before_overall(table: Table, category: str) -> None:
    if category == OVERALL:
        table.add_section()


def _spread(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return NONE
    return f"{values['median']:{form}} [dim]{values['min']:{form}}–{values['max']:{form}}[/dim]"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}"
