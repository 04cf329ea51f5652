"""Compares two servers: the same requests to both, in turns, and one table with the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.table import Table

from outrider.core.prompts import Prompt
from outrider.lab.loadgen.client import connect, run_requests
from outrider.lab.loadgen.figures import Figures
from outrider.lab.loadgen.response import RequestResult
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import plan_requests
from outrider.runtime.report.console import NONE, new_table

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
NOTE = (
    "Latencies are p50 / p95 / p99. A ratio above 1 is in favor of the first server. Both servers got the same"
    " requests, in the order A, B, B, A."
)


@dataclass(slots=True, kw_only=True)
class ServerLoad:
    """The answers of one server."""

    url: str
    model: str
    results: list[RequestResult] = field(default_factory=list)
    seconds: float = 0.0  # of its load


async def run_both(settings: Settings, prompts: Sequence[Prompt]) -> tuple[ServerLoad, ServerLoad]:
    """Return the results of both servers. The order is A, B, B, A, so a drift of the machine affects both alike."""
    assert settings.against is not None
    other_settings = replace(settings, base_url=settings.against, model=settings.against_model)
    async with connect(settings) as (client, model), connect(other_settings) as (other, other_model):
        first = ServerLoad(url=settings.base_url, model=model)
        second = ServerLoad(url=settings.against, model=other_model)
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


def comparison(first: Figures, second: Figures) -> dict[str, float | None]:
    """Return the rates of the first server over those of the second, and the second's latencies over the first's.

    A ratio above 1 is in favor of the first server. None: one of the two is missing.
    """
    ratios = {name: _ratio(getattr(first, name), getattr(second, name)) for name in _RATES}
    for name in _LATENCIES:
        ratios[f"{name}_p50"] = _ratio(second.ms[name].get("p50"), first.ms[name].get("p50"))
    return ratios


def table(loads: Sequence[ServerLoad], figures: Sequence[Figures], ratios: Mapping[str, float | None]) -> Table:
    """Return a table of the two servers side by side."""
    side_by_side = new_table("Two servers side by side")
    for heading in ("", *(f"{load.model} at {load.url}" for load in loads), "A over B"):
        side_by_side.add_column(heading, overflow="fold")
    for name, label in _RATES.items():
        side_by_side.add_row(label, *(f"{getattr(each, name):.2f}" for each in figures), _text(ratios[name]))
    for name, label in _LATENCIES.items():
        cells = [" / ".join(map("{:.1f}".format, each.ms[name].values())) for each in figures]
        side_by_side.add_row(f"{name}: {label}, ms", *(cell or NONE for cell in cells), _text(ratios[f"{name}_p50"]))
    side_by_side.add_row("failed requests", *(str(len(each.errors)) for each in figures))
    side_by_side.add_row("requests sent again", *(str(each.retries) for each in figures))
    return side_by_side


def _ratio(value: float | None, other: float | None) -> float | None:
    return round(value / other, 3) if value and other else None


def _text(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"
