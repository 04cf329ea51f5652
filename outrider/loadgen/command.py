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
    within = [each for each in good if each.first <= settings.first_within and each.per_token <= settings.token_within]
    document: dict[str, Any] = {
        "benchmark": "outrider load",
        "arguments": {name: value for name, value in asdict(settings).items() if name != "api_key"},
        "seconds": round(seconds, 3),
        "answers": len(good),
        "cancelled": sum(each.cancelled for each in asked),
        "errors": [each.error for each in asked if each.error],
        "output_tokens_per_s": round(sum(each.tokens for each in good) / seconds, 2),
        "answers_per_s": round(len(good) / seconds, 3),
        "goodput_per_s": round(len(within) / seconds, 3),
        "ms": {
            "to the first token": points([each.first for each in good]),
            "between tokens": points([gap for each in good for gap in each.token_gaps]),
            "between pieces": points([gap for each in good for gap in each.gaps]),
            "a token, in the mean": points([each.per_token for each in good]),
            "whole answer": points([each.whole for each in good]),
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
        f"{document['answers']} answers{_left(document['cancelled'])} in {document['seconds']:.1f} s:"
        f" {document['output_tokens_per_s']:.1f} tokens/s, {document['answers_per_s']:.2f} answers/s;"
        f" {document['goodput_per_s']:.2f} of them within {settings.first_within:g} s to the first token"
        f" and {settings.token_within:g} s a token"
    )
    if errors := document["errors"]:
        people.print(f"{len(errors)} went wrong, the first: {errors[0]}", style="red", markup=False)


def _left(cancelled: int) -> str:
    return f", and {cancelled} that hung up," if cancelled else ""


def _title(settings: Settings) -> str:
    how = f"{settings.rate:g} a second" if settings.rate is not None else f"{settings.concurrency or 1} at a time"
    return f"{settings.requests} requests to {settings.url}, {how}"
