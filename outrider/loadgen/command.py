"""The verb `load`, as a terminal sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError
from outrider.loadgen.settings import Settings
from outrider.measure.prompts import read_prompts
from outrider.report.console import print_document

_POINTS = (50, 95, 99)


def load(settings: Settings, *, as_json: bool) -> None:
    """Put load on a server, and say how long it let people wait.

    Raises:
        OutriderError: there is no such server, or what asks it is not installed.
    """
    try:
        from outrider.loadgen.client import put_load
    except ImportError as error:
        raise OutriderError(f'load needs {error.name}; run pip install "outrider[serve]"') from error
    asked, seconds = asyncio.run(put_load(settings, read_prompts(settings.prompts)))
    good = [each for each in asked if each.done]
    within = [each for each in good if each.ttft <= settings.goodput_ttft and each.tpot <= settings.goodput_tpot]
    document: dict[str, Any] = {
        "benchmark": "outrider load",
        "arguments": {name: value for name, value in asdict(settings).items() if name != "api_key"},
        "seconds": round(seconds, 3),
        "completed": len(good),
        "cancelled": sum(each.cancelled for each in asked),
        "errors": [each.error for each in asked if each.error],
        "output_tokens_per_s": round(sum(each.tokens for each in good) / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "goodput_per_s": round(len(within) / seconds, 3),
        "ms": {
            "ttft": points([each.ttft for each in good]),
            "itl": points([gap for each in good for gap in each.inter_token_latencies]),
            "chunk": points([gap for each in good for gap in each.chunk_gaps]),
            "tpot": points([each.tpot for each in good]),
            "e2e": points([each.e2e for each in good]),
        },
    }
    print_document(document, partial(_show, settings), as_json=as_json)


def points(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in ms: the smallest value that so many per cent do not exceed."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{share}": round(1e3 * ordered[-(-len(ordered) * share // 100) - 1], 3) for share in _POINTS}


def _show(settings: Settings, document: dict[str, Any], people: Console) -> None:
    table = Table(title=_title(settings))
    table.add_column("ms")
    for share in _POINTS:
        table.add_column(f"p{share}", justify="right")
    for name, found in document["ms"].items():
        table.add_row(name, *(f"{value:.1f}" for value in found.values()))
    people.print(table)
    people.print(
        f"{document['completed']} answers{_left(document['cancelled'])} in {document['seconds']:.1f} s:"
        f" {document['output_tokens_per_s']:.1f} tokens/s, {document['requests_per_s']:.2f} answers/s;"
        f" {document['goodput_per_s']:.2f} of them within {settings.goodput_ttft:g} s to the first token"
        f" and {settings.goodput_tpot:g} s a token"
    )
    if errors := document["errors"]:
        people.print(f"{len(errors)} went wrong, the first: {errors[0]}", style="red", markup=False)


def _left(cancelled: int) -> str:
    return f", and {cancelled} that hung up," if cancelled else ""


def _title(settings: Settings) -> str:
    how = (
        f"{settings.request_rate:g} a second"
        if settings.request_rate is not None
        else f"{settings.max_concurrency or 1} at a time"
    )
    return f"{settings.num_requests} requests to {settings.base_url}, {how}"
