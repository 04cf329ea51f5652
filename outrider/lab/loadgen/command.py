"""The command `outrider load`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.core.prompts import Prompt, read_prompts
from outrider.errors import OutriderError
from outrider.lab.client.server import retries_text
from outrider.lab.loadgen.response import RequestResult
from outrider.lab.loadgen.settings import Settings
from outrider.runtime.report.console import print_document
from outrider.runtime.report.page import write_report

_PERCENTILES = (50, 95, 99)


def load(settings: Settings, *, as_json: bool) -> bool:
    """Generate load for a server and print its throughput and latencies.

    Returns whether each server has completed a request, unless all were canceled.

    Raises:
        OutriderError: the server cannot be reached, or the HTTP client is not installed.
    """
    try:
        from outrider.lab.loadgen.client import run_load
    except ImportError as error:
        raise OutriderError(f'load needs {error.name}; run pip install "outrider[serve]"') from error
    arguments = {name: value for name, value in asdict(settings).items() if name != "api_key"}
    prompts = read_prompts(settings.prompts)
    if settings.against is not None:
        return _compare(settings, prompts, arguments, as_json=as_json)
    results, seconds = asyncio.run(run_load(settings, prompts))
    document = {"benchmark": "outrider load", "arguments": arguments, **measured(settings, results, seconds)}
    print_document(document, partial(_print_table, settings), as_json=as_json)
    return _has_answered(document)


def _has_answered(measured: Mapping[str, Any]) -> bool:
    return bool(measured["completed"] or not measured["errors"])


def measured(settings: Settings, results: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Return throughput and latencies of one server."""
    completed = [result for result in results if result.completed]
    num_good = sum(
        result.ttft <= settings.goodput_ttft and result.tpot <= settings.goodput_tpot for result in completed
    )
    inter_token_latencies = [latency for result in completed for latency in result.inter_token_latencies]
    chunk_gaps = [gap for result in completed for gap in result.chunk_gaps]
    return {
        "seconds": round(seconds, 3),
        "completed": len(completed),
        "canceled": sum(result.canceled for result in results),
        "retries": sum(result.retries for result in results),
        "errors": [result.error for result in results if result.error],
        "output_tokens_per_s": round(sum(result.tokens for result in completed) / seconds, 2),
        "requests_per_s": round(len(completed) / seconds, 3),
        "goodput_per_s": round(num_good / seconds, 3),
        "ms": {
            "ttft": percentiles([result.ttft for result in completed]),
            "itl": percentiles(inter_token_latencies),
            "chunk": percentiles(chunk_gaps),
            "tpot": percentiles([result.tpot for result in completed]),
            "e2e": percentiles([result.e2e for result in completed]),
        },
    }


def _compare(settings: Settings, prompts: Sequence[Prompt], arguments: dict[str, Any], *, as_json: bool) -> bool:
    """Measure two servers, print both, and write the page. Return whether both have completed a request."""
    from outrider.lab.loadgen.compare import check_page, comparison, page, run_both

    if settings.report is not None:
        check_page(settings.report)
    both = asyncio.run(run_both(settings, prompts))
    servers = [
        {"url": url, "model": served.model, **measured(settings, served.results, served.seconds)}
        for url, served in zip((settings.base_url, settings.against), both, strict=True)
    ]
    document: dict[str, Any] = {
        "benchmark": "outrider load",
        "arguments": arguments,
        "servers": servers,
        "ratios": comparison(*servers),
    }

    def show(document: dict[str, Any], console: Console) -> None:
        for server in document["servers"]:
            _print_table(replace(settings, base_url=server["url"]), server, console)
        ratio = document["ratios"]["output_tokens_per_s"]
        if ratio is not None:
            console.print(f"{servers[0]['url']} has {ratio:.2f} times the tokens/s of {servers[1]['url']}")

    def write(document: dict[str, Any]) -> None:
        if settings.report is not None:
            write_report(page(document, settings.report), settings.report)

    print_document(document, show, as_json=as_json, write=write)
    return all(map(_has_answered, servers))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentile in ms; {} without values.

    The p-th percentile is the smallest value that at least p percent of the values do not exceed.
    """
    ordered = sorted(seconds)
    if not ordered:
        return {}
    percentiles = {}
    for percent in _PERCENTILES:
        rank = -(-len(ordered) * percent // 100)  # rounded up
        percentiles[f"p{percent}"] = round(1e3 * ordered[rank - 1], 3)
    return percentiles


def _print_table(settings: Settings, document: dict[str, Any], console: Console) -> None:
    console.print(_title(settings), markup=False, highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("ms")
    for percent in _PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for name, percentiles in document["ms"].items():
        table.add_row(name, *(f"{percentiles[f'p{percent}']:.1f}" if percentiles else "–" for percent in _PERCENTILES))
    console.print(table)
    canceled = f" and {document['canceled']} canceled" if document["canceled"] else ""
    console.print(
        f"{document['completed']} completed{canceled} requests in {document['seconds']:.1f} s:"
        f" {document['output_tokens_per_s']:.1f} tokens/s, {document['requests_per_s']:.2f} requests/s"
    )
    console.print(
        f"goodput: {document['goodput_per_s']:.2f} requests/s within {settings.goodput_ttft:g} s to the first token"
        f" and {settings.goodput_tpot:g} s per token"
    )
    if document["retries"]:
        console.print(retries_text(document["retries"]), soft_wrap=True, markup=False, highlight=False)
    if errors := document["errors"]:
        console.print(f"{len(errors)} requests failed; the first error: {errors[0]}", style="red", markup=False)


def _title(settings: Settings) -> str:
    if settings.request_rate is not None:
        load = f"{settings.request_rate:g} per second"
    else:
        load = f"{settings.max_concurrency or 1} at a time"
    return f"{settings.num_requests} requests to {settings.base_url}, {load}"
