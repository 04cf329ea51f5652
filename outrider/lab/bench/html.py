"""The report of a benchmark as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from outrider.lab.bench.conditions import conditions, latency_text, median_text, memory
from outrider.lab.bench.report import OVERALL, PLAIN, SPECULATIVE, bound_text, summary
from outrider.runtime.report.console import NONE, Document
from outrider.runtime.report.page import html_page, page_header, pairs_table, section, table


def page(document: Document) -> str:
    """Return the HTML of the report."""
    from outrider.lab.bench.plots import draw

    sections = [section("By category", _results(document))]
    sections += [section(f"Against {axis}", _sweep(axis, entries)) for axis, entries in document["sweeps"].items()]
    sections.append(section("Memory", pairs_table(memory(document))))
    sections.append(section("Conditions", pairs_table(conditions(document))))
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in document["definitions"].items())
    glossary = f"<details><summary>Definitions</summary><dl>{terms}</dl></details>\n"
    return html_page("outrider bench", _header(document), draw(document), "".join(sections) + glossary)


def _header(document: Document) -> str:
    speedup = document["results"][OVERALL][SPECULATIVE]["speedup"]
    title = f"{speedup['median']:.2f} times plain decoding" if speedup else "Too few tokens to measure speed"
    warning = (
        ""
        if document["exact"]
        else f"This verifier is not exact{bound_text(document)}: the output distribution may differ."
    )
    version = f"outrider {document['versions']['outrider']} bench"
    commit_hash, plus, changes = (document["commit"] or "").partition("+")
    if commit_hash:
        version += f", commit {commit_hash[:10]}{plus}{changes}"
    return page_header(version, title, summary(document), _tiles(document), warning=warning)


def _tiles(document: Document) -> list[tuple[str, str]]:
    """Return the most important numbers, each with its label."""
    overall = document["results"][OVERALL]
    limits = document["limits"]
    use = document["memory"]
    plain = overall[PLAIN]
    speculative = overall[SPECULATIVE]
    plain_rate = median_text(plain["tokens_per_s"])
    tiles = [
        (median_text(speculative["tokens_per_s"]), f"tokens/s speculative; {plain_rate} plain"),
        (f"{speculative['tau']:.2f}", f"tau, tokens per pass; k is {document['arguments']['k']}"),
    ]
    if speculative["latency_ms"] and plain["latency_ms"]:
        plain_latency = f"{plain['latency_ms']['p99']:.1f}"
        tiles.append((f"{speculative['latency_ms']['p99']:.1f} ms", f"between tokens at p99; {plain_latency} plain"))
    if limits[PLAIN]["share_of_limit"] is not None:
        plain_share = _percent(limits[PLAIN]["share_of_limit"])
        speculative_share = _percent(limits[SPECULATIVE]["share_of_limit"])
        label = f"of the limit reached by plain decoding; {speculative_share} of limit × tau by speculation"
        tiles.append((plain_share, label))
    if use["draft_weight_bytes"]:
        label = f"of {use['context']} tokens more would fit without the draft"
        tiles.append((f"{use['draft_in_sequences']:.1f} sequences", label))
    return tiles


def _results(document: Document) -> str:
    results = document["results"]
    names = list(results[OVERALL])
    head = ["category", *(name.replace("_", " ") for name in names), "speedup", "tau", "accepted, %", "p50 p95 p99, ms"]
    rows = []
    for category, figures in results.items():
        speculative = figures[SPECULATIVE]
        rates = [median_text(figures[name]["tokens_per_s"]) for name in names]
        acceptance = " ".join(f"{100 * share:.0f}" for share in speculative["acceptance_by_position"])
        cells = [
            _spread(speculative["speedup"], 2),
            f"{speculative['tau']:.2f}",
            acceptance,
            latency_text(speculative["latency_ms"]),
        ]
        rows.append([escape(category.replace("_", " ")), *rates, *cells])
    return table(head, rows, marked=True) + _note("Tokens/s. Latency and acceptance are those of speculation.")


def _sweep(axis: str, entries: Sequence[Document]) -> str:
    head = [axis, PLAIN, SPECULATIVE, "speedup", "tau", "p50 p95 p99, ms", "of the limit", "of limit × tau"]
    rows = []
    for entry in entries:
        plain = entry[PLAIN]
        speculative = entry[SPECULATIVE]
        rates = [_spread(each["tokens_per_s"], 0) for each in (plain, speculative)]
        cells = [
            _spread(speculative["speedup"], 2),
            f"{speculative['tau']:.2f}",
            latency_text(speculative["latency_ms"]),
        ]
        shares = [_percent(entry["limits"][name]["share_of_limit"]) for name in (PLAIN, SPECULATIVE)]
        rows.append([f"{entry['value']:g}", *rates, *cells, *shares])
    return table(head, rows)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _spread(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return NONE
    return f"{values['median']:.{digits}f} <small>{values['min']:.{digits}f}–{values['max']:.{digits}f}</small>"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}%"
