"""Compares two servers: the same requests to both, in turns, and one page with the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from outrider.core.prompts import Prompt
from outrider.errors import OutriderError
from outrider.lab.loadgen.client import connect, run_requests
from outrider.lab.loadgen.response import RequestResult
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import plan_requests
from outrider.runtime.atomic_files import check_writable
from outrider.runtime.report.console import NONE
from outrider.runtime.report.page import html_page, page_header, pairs_table, section, table

_SUFFIXES = (".html", ".md")
_LATENCIES = {
    "ttft": "to the first token",
    "itl": "between tokens",
    "chunk": "between chunks",
    "tpot": "per token after the first chunk",
    "e2e": "whole request",
}
_RATES = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput, requests/s",
}


def check_page(file: str) -> None:
    """Check before a measurement that its page can be written.

    Raises:
        OutriderError: the suffix is neither .html nor .md, or the file cannot be written.
    """
    if Path(file).suffix not in _SUFFIXES:
        raise OutriderError(f"--report {file} has another suffix than .html and .md; use for example report.html")
    check_writable(file)


@dataclass(slots=True, kw_only=True)
class ServerLoad:
    """The answers of one server."""

    model: str
    results: list[RequestResult] = field(default_factory=list)
    seconds: float = 0.0  # of its load


async def run_both(settings: Settings, prompts: Sequence[Prompt]) -> tuple[ServerLoad, ServerLoad]:
    """Send the requests to both servers, in the order A, B, B, A, so that a drift of the machine affects both alike."""
    assert settings.against is not None
    other_settings = replace(settings, base_url=settings.against, model=settings.against_model)
    async with connect(settings) as (client, model), connect(other_settings) as (other, other_model):
        first = ServerLoad(model=model)
        second = ServerLoad(model=other_model)
        requests = plan_requests(settings, prompts, model)
        others = plan_requests(other_settings, prompts, other_model)
        half = max(len(requests) // 2, 1)
        for part in (slice(0, half), slice(half, None)):
            turns = [(client, requests, first), (other, others, second)]
            for sender, planned, load in turns if part.start == 0 else reversed(turns):
                if not planned[part]:
                    continue
                results, seconds = await run_requests(settings, sender, planned[part])
                load.results += results
                load.seconds += seconds
    return first, second


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the rates of the first server over those of the second, and the second's latencies over the first's.

    A ratio above 1 is in favor of the first server. None: one of the two is missing.
    """
    ratios: dict[str, float | None] = {name: _ratio(first[name], second[name]) for name in _RATES}
    for name in _LATENCIES:
        ratios[f"{name}_p50"] = _ratio(second["ms"][name].get("p50"), first["ms"][name].get("p50"))
    return ratios


def page(document: Mapping[str, Any], file: str) -> str:
    """Return the page of two servers, as HTML or as Markdown by the suffix of the file."""
    return _markdown(document) if Path(file).suffix == ".md" else _html(document)


def _rows(document: Mapping[str, Any]) -> list[list[str]]:
    first, second = document["servers"]
    rows = []
    for name, label in _RATES.items():
        rows.append([label, f"{first[name]:.2f}", f"{second[name]:.2f}", _text(document["ratios"][name])])
    for name, label in _LATENCIES.items():
        cells = [_percentiles(each["ms"][name]) for each in (first, second)]
        rows.append([f"{name}: {label}, ms", *cells, _text(document["ratios"][f"{name}_p50"])])
    failed = [str(len(each["errors"])) for each in (first, second)]
    rows.append(["failed requests", *failed, ""])
    rows.append(["requests sent again", *(str(each["retries"]) for each in (first, second)), ""])
    return rows


def _percentiles(ms: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in ms.values()) or NONE


def _headings(document: Mapping[str, Any]) -> list[str]:
    return ["", *(f"{each['model']} at {each['url']}" for each in document["servers"]), "A over B"]


_NOTE = (
    "Latencies are p50 / p95 / p99. A ratio above 1 is in favor of the first server. Both servers got the same"
    " requests, in the order A, B, B, A."
)


def _markdown(document: Mapping[str, Any]) -> str:
    rows = [_headings(document), ["---"] * 4, *_rows(document)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    conditions = "\n".join(f"- {name}: {value}" for name, value in _conditions(document))
    return f"# Two servers side by side\n\n{table}\n\n{_NOTE}\n\n## Conditions\n\n{conditions}\n"


def _html(document: Mapping[str, Any]) -> str:
    first, second = document["servers"]
    ratio = document["ratios"]["output_tokens_per_s"]
    title = "Too few tokens to compare" if ratio is None else f"{ratio:.2f} times the tokens/s"
    tiles = [
        (f"{first['output_tokens_per_s']:.1f}", "tokens/s of A"),
        (f"{second['output_tokens_per_s']:.1f}", "tokens/s of B"),
        (_text(document["ratios"]["ttft_p50"]), "time to first token, B over A"),
        (_text(document["ratios"]["e2e_p50"]), "time of a request, B over A"),
    ]
    about = f"A: {first['model']} at {first['url']}. B: {second['model']} at {second['url']}."
    rows = [list(map(escape, row)) for row in _rows(document)]
    results = table(_headings(document), rows) + f'<p class="note">{escape(_NOTE)}</p>'
    rest = section("Results", results) + section("Conditions", pairs_table(_conditions(document)))
    return html_page("outrider load", page_header("outrider load", title, about, tiles), (), rest)


def _conditions(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    hidden = ("base_url", "against", "against_model", "model", "report")
    return [(name, str(value)) for name, value in document["arguments"].items() if name not in hidden]


def _ratio(value: float | None, other: float | None) -> float | None:
    return round(value / other, 3) if value and other else None


def _text(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"
