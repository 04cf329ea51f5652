"""The plots of a report, each from the document alone; one for which there is no data is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, PercentFormatter, StrMethodFormatter

from outrider.bench.report import OVERALL, PLAIN, SPECULATIVE
from outrider.report import svg
from outrider.report.console import Document

_BAR = 0.29  # inches for a bar
_LINES = 2.7  # inches for a plot with lines
_DASHED = (0, (4, 2))


def draw(document: Document) -> list[svg.Plot]:
    """All plots for which the document has data."""
    return svg.drawn(_PLOTS, document)


def _spoken(name: str) -> str:
    """A contestant's or a category's name as people read it."""
    return name.replace("_", " ")


def _limit(document: Document) -> Figure | None:
    rows = {name: each for name, each in document["results"][OVERALL].items() if each["tokens_per_s"]}
    if not rows:
        return None
    figure, axes = svg.canvas(0.5 + 0.55 * len(rows), grid="")
    for y, (name, each) in enumerate(rows.items()):
        rate, limit = each["tokens_per_s"], document["limits"].get(name)
        note = f"{_spoken(name)}: {rate['median']:.0f}"
        if limit:
            most = limit["limit_tokens_per_s"]
            axes.barh(y, most, height=0.4, color=svg.TRACK)
            axes.vlines(most, y - 0.28, y + 0.28, color=svg.LIMIT)
            note += f", {100 * limit['share_of_limit']:.0f}% of at most {most:.0f}"
        axes.barh(y, rate["median"], height=0.4, color=_colour(name, list(rows)))
        axes.text(0, y - 0.27, note, va="bottom")
    axes.set_ylim(len(rows) - 0.65, -0.75)
    axes.set_yticks([])
    axes.set_xlabel("tokens/s")
    return figure


def _speedup(document: Document) -> Figure | None:
    spreads = {name: each[SPECULATIVE]["speedup"] for name, each in document["results"].items()}
    known = {name: spread for name, spread in spreads.items() if spread}
    if not known:
        return None
    figure, axes = svg.canvas(0.5 + _BAR * len(known), grid="x")
    most = max(spread["max"] for spread in known.values())
    for y, (name, spread) in enumerate(known.items()):
        axes.barh(y, spread["median"], height=0.62, color=svg.FAST, alpha=1 if name == OVERALL else 0.6)
        axes.hlines(y, spread["min"], spread["max"], color=svg.INK, linewidth=1.2)
        axes.text(spread["max"] + 0.02 * most, y, f"{spread['median']:.2f}", va="center")
    axes.axvline(1, color=svg.PLAIN, linewidth=1.6, linestyle=_DASHED)
    axes.set_xlim(0, 1.12 * most)
    _label_rows(axes, map(_spoken, known))
    axes.set_xlabel("times plain decoding, which is the dashed line")
    return figure


def _acceptance(document: Document) -> Figure | None:
    shares = {name: each[SPECULATIVE]["acceptance_by_position"] for name, each in document["results"].items()}
    overall = shares.pop(OVERALL)
    if not overall:
        return None
    figure, axes = svg.canvas(_LINES)
    met = [[each[i] for each in shares.values() if i < len(each)] for i in range(len(overall))]
    positions = range(1, len(overall) + 1)
    axes.fill_between(
        positions, list(map(min, met)), list(map(max, met)), color=svg.FAST, alpha=0.16, label="categories", lw=0
    )
    axes.plot(positions, overall, color=svg.FAST, marker="o", label="overall")
    _accepted_axes(axes, len(overall))
    return figure


def _acceptance_by_temperature(document: Document) -> Figure | None:
    entries = document["sweeps"].get("temperature", [])
    lines = {entry["value"]: entry[SPECULATIVE]["acceptance_by_position"] for entry in entries}
    if not any(lines.values()):
        return None
    figure, axes = svg.canvas(_LINES)
    for i, (temperature, shares) in enumerate(lines.items()):
        colour = svg.SERIES[i % len(svg.SERIES)]
        axes.plot(range(1, len(shares) + 1), shares, color=colour, marker="o", label=f"T = {temperature:g}")
    _accepted_axes(axes, max(map(len, lines.values())))
    return figure


def _latency(document: Document) -> Figure | None:
    overall = document["results"][OVERALL]
    rows = {name: each["latency_ms"] for name, each in overall.items() if each["latency_ms"]}
    if not rows:
        return None
    figure, axes = svg.canvas(_LINES)
    width = 0.8 / len(rows)
    for i, (name, marks) in enumerate(rows.items()):
        places = [p + (i - (len(rows) - 1) / 2) * width for p in range(len(marks))]
        bars = axes.bar(
            places, marks.values(), width=0.9 * width, color=_colour(name, list(overall)), label=_spoken(name)
        )
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(3), ["p50", "p95", "p99"])
    axes.set_ylabel("ms between tokens")
    axes.margins(y=0.12)
    svg.legend(axes, columns=2)
    return figure


def _round(document: Document) -> Figure | None:
    if swept := document["sweeps"].get("k"):
        rows = {f"k = {entry['value']}": entry[SPECULATIVE] for entry in swept}
    else:
        rows = {name: document["results"][OVERALL][name] for name in (PLAIN, SPECULATIVE)}
    rows = {name: stats for name, stats in rows.items() if stats.get("rounds")}
    if not rows:
        return None
    figure, axes = svg.canvas(0.8 + _BAR * len(rows), grid="x")
    left = [0.0] * len(rows)
    parts = {"draft_ms": ("draft", svg.DRAFT), "target_ms": ("target", svg.TARGET)}
    for part, (name, colour) in {**parts, "host_ms": ("host", svg.HOST)}.items():
        widths = [stats[part] for stats in rows.values()]
        axes.barh(range(len(rows)), widths, left=left, height=0.62, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, whole in enumerate(left):
        axes.text(whole + 0.015 * max(left), y, f"{whole:.1f}", va="center")
    _label_rows(axes, rows)
    axes.set_xlabel("ms a round")
    axes.margins(x=0.1)
    svg.legend(axes)
    return figure


def _against_k(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("k", []), "k, guesses a round")


def _against_batch(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("batch", []), "batch, rows at once", doubling=True)


def _against_context(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("context", []), "context, tokens of prompt and completion", doubling=True)


def _rates(entries: Sequence[Document], label: str, *, doubling: bool = False) -> Figure | None:
    """Tokens/s along an axis, with the limits; both scales are ratios, so that a speedup is a distance."""
    known = [entry for entry in entries if entry[PLAIN]["tokens_per_s"] and entry[SPECULATIVE]["tokens_per_s"]]
    if not known:
        return None
    figure, axes = svg.canvas(_LINES + 0.2)
    values = [entry["value"] for entry in known]
    for name, colour in ((SPECULATIVE, svg.FAST), (PLAIN, svg.PLAIN)):
        spread = [entry[name]["tokens_per_s"] for entry in known]
        low, high = ([each[end] for each in spread] for end in ("min", "max"))
        axes.fill_between(values, low, high, color=colour, alpha=0.16, lw=0)
        axes.plot(values, [each["median"] for each in spread], color=colour, marker="o", label=name)
        limit = [entry["limits"][name]["limit_tokens_per_s"] for entry in known]
        note = "limit" if name == PLAIN else "limit × tau"
        axes.plot(values, limit, color=svg.LIMIT if name == PLAIN else colour, linestyle=_DASHED, lw=1.5, label=note)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if doubling:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xlabel(label)
    axes.set_ylabel("tokens/s")
    svg.legend(axes, columns=2)
    return figure


def _accepted_axes(axes: Axes, positions: int) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xticks(range(1, positions + 1))
    axes.set_xlabel("position of the guess in its round")
    svg.legend(axes, columns=5)


def _label_rows(axes: Axes, names: Iterable[str]) -> None:
    words = list(names)
    axes.set_yticks(range(len(words)), words)
    axes.set_ylim(len(words) - 0.5, -0.5)


def _colour(name: str, names: Sequence[str]) -> str:
    own = {PLAIN: svg.PLAIN, SPECULATIVE: svg.FAST}
    return own.get(name) or svg.SERIES[(names.index(name) - len(own) + 1) % len(svg.SERIES)]


_PLOTS: tuple[svg.Drawing[Document], ...] = (
    (
        _limit,
        "Tokens/s and the limit",
        "The line is what the memory's bandwidth and the rate of products allow; for speculation times tau, as if the"
        " draft cost nothing.",
    ),
    (_speedup, "Speedup by category", "Medians over rounds; the thin line is their range."),
    (
        _acceptance,
        "Acceptance by position",
        "Of the guesses whose ancestors were all accepted, the share accepted; the band spans the categories.",
    ),
    (
        _acceptance_by_temperature,
        "Acceptance by temperature",
        "The same share, over all categories, at each temperature.",
    ),
    (
        _latency,
        "Time between tokens",
        "Percentiles over all tokens. The tokens of one round arrive together: the first waits for the round, the"
        " others for nothing.",
    ),
    (_round, "Where a round's time goes", "Guessing, the target's pass, and all else on the host."),
    (_against_k, "Tokens/s against k", "Every k in turns with plain decoding; bands are the range over rounds."),
    (
        _against_batch,
        "Tokens/s against batch",
        "The limit bends where arithmetic, and no longer memory, sets it.",
    ),
    (_against_context, "Tokens/s against context", "Prompts lengthened until prompt and completion fill the context."),
)
