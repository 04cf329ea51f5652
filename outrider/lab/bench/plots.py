"""Draws the plots of a report from its document. Plots without data are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, PercentFormatter, StrMethodFormatter

from outrider.lab.bench.report import OVERALL, PLAIN, SPECULATIVE
from outrider.runtime.report import svg
from outrider.runtime.report.console import Document

_BAR_HEIGHT = 0.29  # inches per bar
_LINE_PLOT_HEIGHT = 2.7  # inches
_DASHED = (0, (4, 2))


def draw(document: Document) -> list[svg.Plot]:
    """Return all plots for which the document has data."""
    return svg.draw_plots(_PLOTS, document)


def _label(name: str) -> str:
    """Return the name of a variant or a category as text."""
    return name.replace("_", " ")


def _limit(document: Document) -> Figure | None:
    variants = {name: each for name, each in document["results"][OVERALL].items() if each["tokens_per_s"]}
    if not variants:
        return None
    figure, axes = svg.canvas(0.5 + 0.55 * len(variants), grid="")
    for y, (name, variant) in enumerate(variants.items()):
        rate = variant["tokens_per_s"]["median"]
        text = f"{_label(name)}: {rate:.0f}"
        limits = document["limits"].get(name)
        if limits:
            limit = limits["limit_tokens_per_s"]
            axes.barh(y, limit, height=0.4, color=svg.TRACK)
            axes.vlines(limit, y - 0.28, y + 0.28, color=svg.LIMIT)
            text += f", {100 * limits['share_of_limit']:.0f}% of at most {limit:.0f}"
        axes.barh(y, rate, height=0.4, color=_color(name, list(variants)))
        axes.text(0, y - 0.27, text, va="bottom")
    axes.set_ylim(len(variants) - 0.65, -0.75)
    axes.set_yticks([])
    axes.set_xlabel("tokens/s")
    return figure


def _speedup(document: Document) -> Figure | None:
    spreads = {name: each[SPECULATIVE]["speedup"] for name, each in document["results"].items()}
    known = {name: spread for name, spread in spreads.items() if spread}
    if not known:
        return None
    figure, axes = svg.canvas(0.5 + _BAR_HEIGHT * len(known), grid="x")
    highest = max(spread["max"] for spread in known.values())
    for y, (name, spread) in enumerate(known.items()):
        axes.barh(y, spread["median"], height=0.62, color=svg.FAST, alpha=1 if name == OVERALL else 0.6)
        axes.hlines(y, spread["min"], spread["max"], color=svg.INK, linewidth=1.2)
        axes.text(spread["max"] + 0.02 * highest, y, f"{spread['median']:.2f}", va="center")
    axes.axvline(1, color=svg.PLAIN, linewidth=1.6, linestyle=_DASHED)
    axes.set_xlim(0, 1.12 * highest)
    _label_bars(axes, map(_label, known))
    axes.set_xlabel("speedup over plain decoding (dashed line)")
    return figure


def _acceptance(document: Document) -> Figure | None:
    by_category = {name: each[SPECULATIVE]["acceptance_by_position"] for name, each in document["results"].items()}
    overall = by_category.pop(OVERALL)
    if not overall:
        return None
    figure, axes = svg.canvas(_LINE_PLOT_HEIGHT)
    lowest = []
    highest = []
    for i in range(len(overall)):
        shares = [acceptance[i] for acceptance in by_category.values() if i < len(acceptance)]
        lowest.append(min(shares))
        highest.append(max(shares))
    positions = range(1, len(overall) + 1)
    axes.fill_between(positions, lowest, highest, color=svg.FAST, alpha=0.16, label="categories", lw=0)
    axes.plot(positions, overall, color=svg.FAST, marker="o", label="overall")
    _acceptance_axes(axes, len(overall))
    return figure


def _acceptance_by_temperature(document: Document) -> Figure | None:
    entries = document["sweeps"].get("temperature", [])
    by_temperature = {entry["value"]: entry[SPECULATIVE]["acceptance_by_position"] for entry in entries}
    if not any(by_temperature.values()):
        return None
    figure, axes = svg.canvas(_LINE_PLOT_HEIGHT)
    for i, (temperature, acceptance) in enumerate(by_temperature.items()):
        color = svg.SERIES[i % len(svg.SERIES)]
        axes.plot(range(1, len(acceptance) + 1), acceptance, color=color, marker="o", label=f"T = {temperature:g}")
    _acceptance_axes(axes, max(map(len, by_temperature.values())))
    return figure


def _latency(document: Document) -> Figure | None:
    overall = document["results"][OVERALL]
    latencies = {name: each["latency_ms"] for name, each in overall.items() if each["latency_ms"]}
    if not latencies:
        return None
    figure, axes = svg.canvas(_LINE_PLOT_HEIGHT)
    width = 0.8 / len(latencies)
    for i, (name, percentiles) in enumerate(latencies.items()):
        offset = (i - (len(latencies) - 1) / 2) * width
        xs = [x + offset for x in range(len(percentiles))]
        color = _color(name, list(overall))
        bars = axes.bar(xs, percentiles.values(), width=0.9 * width, color=color, label=_label(name))
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(3), ["p50", "p95", "p99"])
    axes.set_ylabel("ms between tokens")
    axes.margins(y=0.12)
    svg.legend(axes, columns=2)
    return figure


def _round(document: Document) -> Figure | None:
    if swept := document["sweeps"].get("k"):
        variants = {f"k = {entry['value']}": entry[SPECULATIVE] for entry in swept}
    else:
        variants = {name: document["results"][OVERALL][name] for name in (PLAIN, SPECULATIVE)}
    variants = {name: stats for name, stats in variants.items() if stats.get("rounds")}
    if not variants:
        return None
    figure, axes = svg.canvas(0.8 + _BAR_HEIGHT * len(variants), grid="x")
    ends = [0.0] * len(variants)
    parts = {"draft_ms": ("draft", svg.DRAFT), "target_ms": ("target", svg.TARGET), "host_ms": ("host", svg.HOST)}
    for part, (name, color) in parts.items():
        widths = [stats[part] for stats in variants.values()]
        axes.barh(range(len(variants)), widths, left=ends, height=0.62, color=color, label=name)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for y, total in enumerate(ends):
        axes.text(total + 0.015 * max(ends), y, f"{total:.1f}", va="center")
    _label_bars(axes, variants)
    axes.set_xlabel("ms per round")
    axes.margins(x=0.1)
    svg.legend(axes)
    return figure


def _against_k(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("k", []), "k, draft tokens per round")


def _against_batch(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("batch", []), "batch, sequences at once", doubling=True)


def _against_context(document: Document) -> Figure | None:
    return _rates(document["sweeps"].get("context", []), "context, tokens of prompt and completion", doubling=True)


def _rates(entries: Sequence[Document], label: str, *, doubling: bool = False) -> Figure | None:
    """Plot tokens/s and the limits along an axis.

    The y axis is logarithmic, so that the distance between two lines shows their ratio. `doubling` makes the x axis
    logarithmic as well.
    """
    known = [entry for entry in entries if entry[PLAIN]["tokens_per_s"] and entry[SPECULATIVE]["tokens_per_s"]]
    if not known:
        return None
    figure, axes = svg.canvas(_LINE_PLOT_HEIGHT + 0.2)
    values = [entry["value"] for entry in known]
    for name, color in ((SPECULATIVE, svg.FAST), (PLAIN, svg.PLAIN)):
        spreads = [entry[name]["tokens_per_s"] for entry in known]
        lowest = [spread["min"] for spread in spreads]
        highest = [spread["max"] for spread in spreads]
        axes.fill_between(values, lowest, highest, color=color, alpha=0.16, lw=0)
        axes.plot(values, [spread["median"] for spread in spreads], color=color, marker="o", label=name)
        limits = [entry["limits"][name]["limit_tokens_per_s"] for entry in known]
        limit_label = "limit" if name == PLAIN else "limit × tau"
        limit_color = svg.LIMIT if name == PLAIN else color
        axes.plot(values, limits, color=limit_color, linestyle=_DASHED, lw=1.5, label=limit_label)
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


def _acceptance_axes(axes: Axes, positions: int) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xticks(range(1, positions + 1))
    axes.set_xlabel("position of the draft token in its round")
    svg.legend(axes, columns=5)


def _label_bars(axes: Axes, names: Iterable[str]) -> None:
    labels = list(names)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _color(name: str, names: Sequence[str]) -> str:
    fixed = {PLAIN: svg.PLAIN, SPECULATIVE: svg.FAST}
    return fixed.get(name) or svg.SERIES[(names.index(name) - len(fixed) + 1) % len(svg.SERIES)]


_PLOTS: tuple[svg.PlotSpec[Document], ...] = (
    (
        _limit,
        "Tokens/s and the limit",
        "The line is the limit that memory bandwidth and arithmetic set. For speculation it is multiplied by tau, as if"
        " drafting cost nothing.",
    ),
    (_speedup, "Speedup by category", "Medians over repeats. The thin line is the range."),
    (
        _acceptance,
        "Acceptance by position",
        "The share of draft tokens that were accepted, among those whose ancestors were all accepted. The band spans"
        " the categories.",
    ),
    (
        _acceptance_by_temperature,
        "Acceptance by temperature",
        "The same share, over all categories, at each temperature.",
    ),
    (
        _latency,
        "Time between tokens",
        "Percentiles over all tokens. The tokens of one round arrive together: the first one waits for the whole round,"
        " the others do not wait.",
    ),
    (_round, "Time of a round", "Drafting, the target's forward pass, and the remaining work of the host."),
    (
        _against_k,
        "Tokens/s against k",
        "Each k is measured in turns with plain decoding. Bands are the range over repeats.",
    ),
    (
        _against_batch,
        "Tokens/s against batch",
        "The limit bends where arithmetic becomes slower than memory.",
    ),
    (
        _against_context,
        "Tokens/s against context",
        "Prompts are lengthened until prompt and completion fill the context.",
    ),
)
