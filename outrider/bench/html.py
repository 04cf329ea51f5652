"""The report of a benchmark as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from outrider.bench.conditions import conditions, latency_text, median_text, memory
from outrider.bench.report import OVERALL, PLAIN, SPECULATIVE, summary
from outrider.report.console import NONE, Document
from outrider.report.page import framed, opening, pairs, section


def page(document: Document) -> str:
    """The page as text."""
    from outrider.bench.plots import draw

    tables = [section("By category", _results(document))]
    tables += [section(f"Against {axis}", _sweep(axis, all)) for axis, all in document["sweeps"].items()]
    tables += [section("Memory", pairs(memory(document))), section("Conditions", pairs(conditions(document)))]
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in document["definitions"].items())
    glossary = f"<details><summary>What the words mean</summary><dl>{words}</dl></details>\n"
    return framed("outrider bench", _opening(document), draw(document), "".join(tables) + glossary)


def _opening(document: Document) -> str:
    overall, commit = document["results"][OVERALL], document["commit"]
    speedup = overall[SPECULATIVE]["speedup"]
    title = f"{speedup['median']:.2f} times plain decoding" if speedup else "Too little was decoded to tell a speed"
    warning = "" if document["exact"] else "This verifier is not exact: the text may differ."
    head, plus, changed = (commit or "").partition("+")
    version = f"outrider {document['versions']['outrider']} bench" + (
        f", commit {head[:10]}{plus}{changed}" if head else ""
    )
    return opening(version, title, summary(document), _tiles(document), warning=warning)


def _tiles(document: Document) -> list[tuple[str, str]]:
    """The figures that matter most, each with what it is."""
    overall, limits, held = document["results"][OVERALL], document["limits"], document["memory"]
    plain, guessing = overall[PLAIN], overall[SPECULATIVE]
    tiles = [
        (median_text(guessing["tokens_per_s"]), f"tokens/s speculative; {median_text(plain['tokens_per_s'])} plain"),
        (f"{guessing['tau']:.2f}", f"tau, tokens a pass; k is {document['arguments']['k']}"),
    ]
    if guessing["latency_ms"] and plain["latency_ms"]:
        gaps = (f"{each['latency_ms']['p99']:.1f}" for each in (guessing, plain))
        tiles.append((f"{next(gaps)} ms", f"between tokens at p99; {next(gaps)} plain"))
    if limits[PLAIN]["share_of_limit"] is not None:
        reached = [_percent(limits[name]["share_of_limit"]) for name in (PLAIN, SPECULATIVE)]
        tiles.append(
            (reached[0], f"of the limit reached by plain decoding; {reached[1]} of limit × tau by speculation")
        )
    if held["draft_weight_bytes"]:
        tiles.append(
            (
                f"{held['draft_in_sequences']:.1f} sequences",
                f"of {held['context']} tokens more would fit without the draft",
            )
        )
    return tiles


def _results(document: Document) -> str:
    results = document["results"]
    names = list(results[OVERALL])
    head = ["category", *(name.replace("_", " ") for name in names), "speedup", "tau", "accepted, %", "p50 p95 p99, ms"]
    rows = []
    for category, figures in results.items():
        guessing = figures[SPECULATIVE]
        shares = " ".join(f"{100 * share:.0f}" for share in guessing["acceptance_by_position"])
        rates = [median_text(figures[name]["tokens_per_s"]) for name in names]
        rest = [_spread(guessing["speedup"], 2), f"{guessing['tau']:.2f}", shares, latency_text(guessing["latency_ms"])]
        rows.append([escape(category.replace("_", " ")), *rates, *rest])
    return _table(head, rows, marked=True) + _note("Tokens/s; latency and acceptance are those of speculation.")


def _sweep(axis: str, entries: Sequence[Document]) -> str:
    head = [axis, PLAIN, SPECULATIVE, "speedup", "tau", "p50 p95 p99, ms", "of the limit", "of limit × tau"]
    rows = []
    for entry in entries:
        plain, guessing, limits = entry[PLAIN], entry[SPECULATIVE], entry["limits"]
        rates = [_spread(each["tokens_per_s"], 0) for each in (plain, guessing)]
        reached = [_percent(limits[name]["share_of_limit"]) for name in (PLAIN, SPECULATIVE)]
        rest = [_spread(guessing["speedup"], 2), f"{guessing['tau']:.2f}", latency_text(guessing["latency_ms"])]
        rows.append([f"{entry['value']:g}", *rates, *rest, *reached])
    return _table(head, rows)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, marked: bool = False) -> str:
    """Cells are markup; with `marked` the last row stands out."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    if marked:
        body[-1] = body[-1].replace("<tr>", '<tr class="overall">', 1)
    return f'<div class="table"><table><tr>{top}</tr>{"".join(body)}</table></div>'


def _spread(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return NONE
    return f"{values['median']:.{digits}f} <small>{values['min']:.{digits}f}–{values['max']:.{digits}f}</small>"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}%"
