"""Prints the results of a benchmark as tables."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from outrider.core.stats import Stats
from outrider.lab.bench.figures import OVERALL, Comparison, Latency, Spread
from outrider.lab.bench.limits import Limit, Limits
from outrider.lab.bench.result import Result
from outrider.lab.bench.sweep import Entry
from outrider.lab.common.memory import MemoryUse
from outrider.runtime.report.console import NONE, bytes_text, new_table

_MAX_POSITIONS = 8  # positions whose acceptance is printed; the JSON document has all


def show(result: Result, console: Console) -> None:
    """Print speed, latency, the time of a round, the sweeps, and the limits."""
    by_category = result.measured.by_category
    console.print(result.summary().replace("(not exact)", "([red]not exact[/red])"), highlight=False)
    console.print(_speed(by_category))
    console.print(_time(by_category))
    for axis, entries in result.sweeps.items():
        console.print(_sweep(axis, entries))
        if axis == "temperature":  # the first one is above
            for entry in entries[1:]:
                console.print(_speed(entry.measured.by_category, f" at temperature {entry.value:g}"))
    for placement in result.placements:
        console.print(str(placement), highlight=False, markup=False)
    machine = _list("This machine, before and after", _rates(result))
    memory = _list("Memory", _memory(result.memory))
    for line in (*_notes(result.measured.overall), machine, _limits(result.measured.limits), memory):
        console.print(line, highlight=False)


def _speed(by_category: dict[str, Comparison], where: str = "") -> Table:
    table = new_table(f"Decoding{where}, tokens/s, and acceptance by position")
    table.add_column("category", no_wrap=True)
    for name in ("plain", "speculative", "speedup", "tau"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accepted, %")  # the one column that wraps on a narrow terminal
    for category, figures in _with_section(by_category, table):
        speculative = figures.speculative
        rates = [each.tokens_per_s for each in (figures.plain, speculative)]
        table.add_row(
            category,
            *(f"{rate.median:.0f}" if rate else NONE for rate in rates),
            _spread(speculative.speedup, ".2f"),
            f"{speculative.stats.tau:.2f}",
            " ".join(f"{100 * share:.0f}" for share in speculative.stats.acceptance[:_MAX_POSITIONS]),
        )
    return table


def _time(by_category: dict[str, Comparison]) -> Table:
    table = new_table("Milliseconds between tokens (p50 p95 p99), and of the parts of a round")
    table.add_column("category", no_wrap=True)
    for name in ("plain", "speculative", "plain round", "draft", "target", "host"):
        table.add_column(name, justify="right", no_wrap=name != "plain round")
    for category, figures in _with_section(by_category, table):
        plain, stats = figures.plain.stats, figures.speculative.stats
        latencies = (_latency(each.latency_ms) for each in (figures.plain, figures.speculative))
        parts = (stats.draft_seconds, stats.target_seconds, stats.host_seconds)
        rounds = (_per_round(plain.seconds, plain), *(_per_round(part, stats) for part in parts))
        table.add_row(category, *latencies, *rounds)
    return table


def _per_round(seconds: float, stats: Stats) -> str:
    """Return the milliseconds of a round. There is none if each completion ended in its first round."""
    return f"{1e3 * seconds / stats.rounds:.2f}" if stats.rounds else NONE


def _sweep(axis: str, entries: Sequence[Entry]) -> Table:
    table = new_table(
        f"Against {axis}, over all categories; tokens/s, and the shares of the limits, plain and speculative"
    )
    for name in (axis, "plain", "speculative", "speedup", "tau", "p50 p95 p99, ms", "% of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        plain, speculative = entry.measured.overall.plain, entry.measured.overall.speculative
        limits = entry.measured.limits
        table.add_row(
            f"{entry.value:g}",
            _spread(plain.tokens_per_s, ".0f"),
            _spread(speculative.tokens_per_s, ".0f"),
            _spread(speculative.speedup, ".2f"),
            f"{speculative.stats.tau:.2f}",
            _latency(speculative.latency_ms),
            " ".join(map(_share, (limits.plain, limits.speculative))),
        )
    return table


def _notes(overall: Comparison) -> list[str]:
    rates = {"plain": overall.plain.tokens_per_s, "speculative": overall.speculative.tokens_per_s}
    texts = ", ".join(f"{name} {_spread(rate, '.0f')}" for name, rate in rates.items())
    lines = [f"Overall tokens/s, median and range over repeats: {texts}."]
    measured = overall.speculative.speedup
    if measured and overall.expected_speedup:
        lines.append(
            f"Speedup [bold]{measured.median:.2f}[/bold]; {overall.expected_speedup:.2f} expected from the measured"
            " acceptance and the measured costs of a round (Leviathan et al. 2023, theorem 3.8)."
        )
    lines.append(
        "Speed counts decoding only, from the first token of a completion to its last. The tokens of one round arrive"
        " together: the first one waits for the whole round, the others do not wait."
    )
    return lines


def _limits(limits: Limits) -> str:
    plain, speculative = limits.plain, limits.speculative
    return (
        f"Plain decoding reads {limits.bytes_per_token / 1e6:.1f} MB per token, which limits it to"
        f" {plain.limit_tokens_per_s:.0f} tokens/s{_reached('it', plain)}. With"
        f" the tau of speculation the limit is {speculative.limit_tokens_per_s:.0f}"
        f" tokens/s{_reached('speculation', speculative)}."
    )


def _reached(what: str, limit: Limit) -> str:
    return "" if limit.share_of_limit is None else f"; {what} reaches {_share(limit)}% of that"


def _rates(result: Result) -> Iterator[str]:
    """Yield the memory bandwidth and the arithmetic rate before and after the benchmark."""
    for kind, bandwidth in result.before.read.items():
        after = result.after.read[kind]
        yield f"read bandwidth, {kind.replace('_', ' ')} {bandwidth / 1e9:.1f} GB/s, then {after / 1e9:.1f}"
    gemm = f"{result.before.gemm / 1e9:.0f} GFLOP/s, then {result.after.gemm / 1e9:.0f}"
    yield f"matrix product {gemm}"


def _memory(use: MemoryUse) -> Iterator[str]:
    """Yield the memory use, and how many more sequences would fit without the draft."""
    parts = {
        "target weights": use.target_weight_bytes,
        "target cache": use.target_cache_bytes,
        "draft weights": use.draft_weight_bytes,
        "draft cache": use.draft_cache_bytes,
        "other": use.other_bytes,
    }
    for name, size in parts.items():
        if size:
            yield f"{name} {bytes_text(size)}"
    yield f"sequences {use.sequences} of {use.context} tokens"
    if use.draft_weight_bytes:
        formula = "(draft weights + draft cache) / (target cache / sequences)"
        yield f"without the draft {use.draft_in_sequences:.1f} more sequences would fit: {formula}"


def _list(title: str, items: Iterable[str]) -> str:
    return f"{title}: {'; '.join(items)}."


def _with_section(by_category: dict[str, Comparison], table: Table) -> Iterator[tuple[str, Comparison]]:
    """Yield the figures of each category, with a line in the table before those of all categories."""
    for category, figures in by_category.items():
        if category == OVERALL:
            table.add_section()
        yield category, figures


def _spread(values: Spread | None, form: str) -> str:
    if values is None:
        return NONE
    return f"{values.median:{form}} [dim]{values.min:{form}}–{values.max:{form}}[/dim]"


def _latency(latency: Latency | None) -> str:
    return str(latency) if latency else NONE


def _share(limit: Limit) -> str:
    return NONE if limit.share_of_limit is None else f"{100 * limit.share_of_limit:.0f}"
