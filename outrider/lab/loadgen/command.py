"""The command `outrider load`."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from rich.console import Console

from outrider.core.packages import needed_by
from outrider.core.prompts import read_prompts
from outrider.lab.client.server import retries_text
from outrider.lab.loadgen.figures import PERCENTILES, Figures
from outrider.lab.loadgen.settings import Settings
from outrider.runtime.report.console import NONE, Document, new_table, print_document, print_plain
from outrider.runtime.report.page import check_report, write_report


class _Loaded(NamedTuple):
    """The results of a load."""

    figures: tuple[Figures, ...]  # of each server
    document: Document
    show: Callable[[Document, Console], None]


def load(settings: Settings, *, as_json: bool) -> bool:
    """Generate load for a server, or for two, and print throughput and latencies.

    Returns whether each server has completed a request, unless all were canceled.

    Raises:
        OutriderError: a server cannot be reached, the HTTP client is not installed, or the report cannot be written.
    """
    if settings.report is not None:
        check_report(settings.report)  # here, so that a mistake is reported before the measurement
    with needed_by("load", "serve"):
        loaded = _load_one(settings) if settings.against is None else _load_both(settings)
    arguments = {name: value for name, value in asdict(settings).items() if name != "api_key"}
    document = {"benchmark": "outrider load", "arguments": arguments, **loaded.document}
    write = partial(write_report, show=loaded.show, file=settings.report) if settings.report else None
    print_document(document, loaded.show, as_json=as_json, write=write)
    return all(each.answered for each in loaded.figures)


def _load_one(settings: Settings) -> _Loaded:
    from outrider.lab.loadgen.client import run_load

    results, seconds = asyncio.run(run_load(settings, read_prompts(settings.prompts)))
    figures = Figures.of(settings, results, seconds)

    def show(_: Document, console: Console) -> None:
        _show(settings, figures, console)

    return _Loaded((figures,), asdict(figures), show)


def _load_both(settings: Settings) -> _Loaded:
    from outrider.lab.loadgen.compare import NOTE, comparison, run_both, table

    loads = asyncio.run(run_both(settings, read_prompts(settings.prompts)))
    first, second = (Figures.of(settings, load.results, load.seconds) for load in loads)
    ratios = comparison(first, second)
    servers = [
        {"url": load.url, "model": load.model, **asdict(figures)}
        for load, figures in zip(loads, (first, second), strict=True)
    ]

    def show(_: Document, console: Console) -> None:
        print_plain(console, _title(settings, "each server"))
        console.print(table(loads, (first, second), ratios))
        console.print(NOTE, highlight=False)
        for figures in (first, second):
            _show_errors(figures, console)

    return _Loaded((first, second), {"servers": servers, "ratios": ratios}, show)


def _show(settings: Settings, figures: Figures, console: Console) -> None:
    print_plain(console, _title(settings, settings.base_url))
    table = new_table("")
    table.add_column("ms")
    names = [f"p{percent}" for percent in PERCENTILES]
    for name in names:
        table.add_column(name, justify="right")
    for latency, values in figures.ms.items():
        table.add_row(latency, *(f"{values[name]:.1f}" if values else NONE for name in names))
    console.print(table)
    canceled = f" and {figures.canceled} canceled" if figures.canceled else ""
    console.print(
        f"{figures.completed} completed{canceled} requests in {figures.seconds:.1f} s:"
        f" {figures.output_tokens_per_s:.1f} tokens/s, {figures.requests_per_s:.2f} requests/s"
    )
    console.print(
        f"goodput: {figures.goodput_per_s:.2f} requests/s within {settings.goodput_ttft:g} s to the first token"
        f" and {settings.goodput_tpot:g} s per token"
    )
    if figures.retries:
        print_plain(console, retries_text(figures.retries))
    _show_errors(figures, console)


def _show_errors(figures: Figures, console: Console) -> None:
    if figures.errors:
        text = f"{len(figures.errors)} requests failed; the first error: {figures.errors[0]}"
        console.print(text, style="red", markup=False)


def _title(settings: Settings, receiver: str) -> str:
    if settings.request_rate is not None:
        load = f"{settings.request_rate:g} per second"
    else:
        load = f"{settings.max_concurrency or 1} at a time"
    return f"{settings.num_requests} requests to {receiver}, {load}"
