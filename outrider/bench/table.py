"""The report as people read it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.conditions import latency_text, median_text, memory, rates
from outrider.bench.report import OVERALL, PLAIN, SPECULATIVE, summary
from outrider.report.console import NONE, titled


def show(document: dict[str, Any], console: Console) -> None:
    """Print speed, latency, where the time went, what was swept, and the limits."""
    results = document["results"]
    console.print(summary(document).replace("(not exact)", "([red]not exact[/red])"), highlight=False)
    console.print(_speed(results))
    console.print(_time(results))
    for axis, entries in document["sweeps"].items():
        console.print(_sweep(axis, entries))
    machine = _listed("This machine, before and after", rates(document))
    for line in (*_notes(document), machine, _limits(document), _listed("Memory", memory(document))):
        console.print(line, highlight=False)


def _speed(results: dict[str, Any]) -> Table:
    peers = [name for name in results[OVERALL] if name not in (PLAIN, SPECULATIVE)]
    table = titled("Decoding, tokens/s, and the share of guesses accepted at each position")
    table.add_column("category", no_wrap=True)
    for name in (PLAIN, SPECULATIVE, *peers):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("tau", justify="right")
    table.add_column("accepted, %", no_wrap=True)
    for category, figures in results.items():
        _rule_before(table, category)
        guessing = figures[SPECULATIVE]
        rates = (median_text(figures[name]["tokens_per_s"]) for name in (PLAIN, SPECULATIVE, *peers))
        shares = " ".join(f"{100 * share:.0f}" for share in guessing["acceptance_by_position"])
        table.add_row(category, *rates, _spread(guessing["speedup"], ".2f"), f"{guessing['tau']:.2f}", shares)
    return table


def _time(results: dict[str, Any]) -> Table:
    table = titled("Milliseconds: between tokens (p50 p95 p99), and in the parts of a round")
    table.add_column("category", no_wrap=True)
    for name in ("plain", "speculative", "plain round", "draft", "target", "host"):
        table.add_column(name, justify="right", no_wrap=name != "plain round")
    for category, figures in results.items():
        _rule_before(table, category)
        plain, guessing = figures[PLAIN], figures[SPECULATIVE]
        parts = (f"{guessing[part]:.2f}" for part in ("draft_ms", "target_ms", "host_ms"))
        whole = sum(plain[part] for part in ("draft_ms", "target_ms", "host_ms"))
        table.add_row(
            category, latency_text(plain["latency_ms"]), latency_text(guessing["latency_ms"]), f"{whole:.2f}", *parts
        )
    return table


def _sweep(axis: str, entries: list[dict[str, Any]]) -> Table:
    table = titled(
        f"Against {axis}, over all categories; tokens/s, and the shares of the limits, plain and speculative"
    )
    for name in (axis, "plain", "speculative", "speedup", "tau", "p50 p95 p99, ms", "% of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        plain, guessing, limits = entry[PLAIN], entry[SPECULATIVE], entry["limits"]
        table.add_row(
            f"{entry['value']:g}",
            _spread(plain["tokens_per_s"], ".0f"),
            _spread(guessing["tokens_per_s"], ".0f"),
            _spread(guessing["speedup"], ".2f"),
            f"{guessing['tau']:.2f}",
            latency_text(guessing["latency_ms"]),
            " ".join(_share(limits[name]["share_of_limit"]) for name in (PLAIN, SPECULATIVE)),
        )
    return table


def _notes(document: dict[str, Any]) -> list[str]:
    overall = document["results"][OVERALL]
    rates = (f"{name} {_spread(overall[name]['tokens_per_s'], '.0f')}" for name in overall)
    measured, expected = overall[SPECULATIVE]["speedup"], overall[SPECULATIVE]["expected_speedup"]
    lines = [f"Overall tokens/s, median and range over rounds: {', '.join(rates)}."]
    if measured and expected:
        lines.append(
            f"Speedup [bold]{measured['median']:.2f}[/bold]; {expected:.2f} expected from the acceptance and the costs"
            " of a round measured here (Leviathan et al. 2023, theorem 3.8)."
        )
    lines.append(
        "Speed counts decoding alone, from a completion's first token to its last. The tokens of one round arrive"
        " together: the first waited for the round, the others for nothing."
    )
    return lines


def _limits(document: dict[str, Any]) -> str:
    limits = document["limits"]
    plain, guessing = limits[PLAIN], limits[SPECULATIVE]
    return (
        f"Plain decoding reads {limits['bytes_per_token'] / 1e6:.1f} MB a token: at most"
        f" {plain['limit_tokens_per_s']:.0f} tokens/s, of which it reaches {_share(plain['share_of_limit'])}%; with the"
        f" tau of speculation at most {guessing['limit_tokens_per_s']:.0f}, of which that reaches"
        f" {_share(guessing['share_of_limit'])}%."
    )


def _listed(title: str, pairs: list[tuple[str, str]]) -> str:
    return f"{title}: " + "; ".join(f"{name} {text}" for name, text in pairs) + "."


def _rule_before(table: Table, category: str) -> None:
    if category == OVERALL:
        table.add_section()


def _spread(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return NONE
    return f"{values['median']:{form}} [dim]{values['min']:{form}}–{values['max']:{form}}[/dim]"


def _share(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}"
