"""The report as people read it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.bench.report import OVERALL, PLAIN, SPECULATIVE

_NONE = "–"


def show(document: dict[str, Any], console: Console) -> None:
    """Print speed, latency and where the time went."""
    results = document["results"]
    console.print(_heading(document), highlight=False)
    console.print(_speed(results))
    console.print(_time(results))
    console.print(_notes(document), highlight=False)


def _heading(document: dict[str, Any]) -> str:
    machine, asked = document["hardware"], document["arguments"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    law = f"temperature {asked['temperature']:g}" if asked["temperature"] else "greedy"
    exact = "exact" if document["exact"] else "[red]not exact[/red]"
    return (
        f"{document['proposer']}, k {asked['k']}, verifier {document['verifier']} ({exact}); {law},"
        f" {document['dtype']}, {asked['batch']} at once, {asked['rounds']} rounds on {where}"
    )


def _speed(results: dict[str, Any]) -> Table:
    peers = [name for name in results[OVERALL] if name not in (PLAIN, SPECULATIVE)]
    table = Table(title="Decoding, tokens/s, and the share of guesses accepted at each position", **_LOOK)
    table.add_column("category", no_wrap=True)
    for name in (PLAIN, SPECULATIVE, *peers):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("tau", justify="right")
    table.add_column("accepted, %", no_wrap=True)
    for category, figures in results.items():
        _rule_before(table, category)
        guessing = figures[SPECULATIVE]
        rates = (_median(figures[name]["tokens_per_s"]) for name in (PLAIN, SPECULATIVE, *peers))
        shares = " ".join(f"{100 * share:.0f}" for share in guessing["acceptance_by_position"])
        table.add_row(category, *rates, _spread(guessing["speedup"], ".2f"), f"{guessing['tau']:.2f}", shares)
    return table


def _time(results: dict[str, Any]) -> Table:
    table = Table(title="Milliseconds: between tokens (p50 p95 p99), and in the parts of a round", **_LOOK)
    table.add_column("category", no_wrap=True)
    for name in ("plain", "speculative", "plain round", "draft", "target", "host"):
        table.add_column(name, justify="right", no_wrap=name != "plain round")
    for category, figures in results.items():
        _rule_before(table, category)
        plain, guessing = figures[PLAIN], figures[SPECULATIVE]
        parts = (f"{guessing[part]:.2f}" for part in ("propose_ms", "target_ms", "host_ms"))
        whole = sum(plain[part] for part in ("propose_ms", "target_ms", "host_ms"))
        table.add_row(category, _latency(plain["latency_ms"]), _latency(guessing["latency_ms"]), f"{whole:.2f}", *parts)
    return table


def _notes(document: dict[str, Any]) -> str:
    memory, overall = document["memory"], document["results"][OVERALL]
    rates = (f"{name} {_spread(overall[name]['tokens_per_s'], '.0f')}" for name in overall)
    measured, expected = overall[SPECULATIVE]["speedup"], overall[SPECULATIVE]["expected_speedup"]
    lines = [f"Overall tokens/s, median and range over rounds: {', '.join(rates)}."]
    if measured and expected:
        lines.append(
            f"Speedup [bold]{measured['median']:.2f}[/bold]; {expected:.2f} expected from the acceptance and the costs"
            " of a round measured here (Leviathan et al. 2023, theorem 3.8)."
        )
    share = memory["plain_share_of_limit"]
    lines.append(
        f"A pass reads {memory['weight_bytes_per_pass'] / 1e6:.1f} MB of weights and the memory delivers"
        f" {memory['read_bytes_per_s'] / 1e9:.1f} GB/s: at most {memory['limit_passes_per_s']:.0f} passes/s"
        + (f", of which plain decoding reaches {100 * share:.0f}%." if share else ".")
    )
    lines.append(
        "Speed counts decoding alone, from a completion's first token to its last. The tokens of one round arrive"
        " together: the first waited for the round, the others for nothing."
    )
    return "\n".join(lines)


def _rule_before(table: Table, category: str) -> None:
    if category == OVERALL:
        table.add_section()


def _median(values: dict[str, float] | None) -> str:
    return f"{values['median']:.0f}" if values else _NONE


def _spread(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return _NONE
    return f"{values['median']:{form}} [dim]{values['min']:{form}}–{values['max']:{form}}[/dim]"


def _latency(values: dict[str, float] | None) -> str:
    return " ".join(f"{value:.1f}" for value in values.values()) if values else _NONE


_LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_justify": "left",
    "title_style": "bold",
    "padding": (0, 1, 0, 0),
}
