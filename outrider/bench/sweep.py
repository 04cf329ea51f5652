"""Where a sweep measures: one axis at a time, the others at their first value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.limits import Roofline, limits
from outrider.bench.report import OVERALL, PLAIN, SPECULATIVE, Sample, compare, mean_cached
from outrider.bench.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What all contestants that are compared with each other have in common."""

    batch: int  # rows at once
    temperature: float
    context: int | None = None  # tokens that prompt and completion fill; None leaves prompts as they are

    def __str__(self) -> str:
        filled = "" if self.context is None else f", context {self.context}"
        return f"batch {self.batch}, temperature {self.temperature:g}{filled}"


def default_condition(settings: Settings) -> Condition:
    """Where all axes meet."""
    return Condition(batch=settings.batch, temperature=settings.temperature)


def axes(settings: Settings) -> dict[str, dict[float, Condition]]:
    """The places along each axis, by its values. k has none: all its values are measured at home."""
    start, sweep = default_condition(settings), settings.sweep
    found: dict[str, dict[float, Condition]] = {
        "batch": {value: replace(start, batch=value) for value in sweep.batch},
        "context": {value: replace(start, context=value) for value in sweep.context},
        "temperature": {value: replace(start, temperature=value) for value in sweep.temperature},
    }
    return {axis: places for axis, places in found.items() if places}


def conditions(settings: Settings) -> list[Condition]:
    """All of them, home first, each once."""
    along = (place for places in axes(settings).values() for place in places.values())
    return list(dict.fromkeys([default_condition(settings), *along]))


def speculative_variants(settings: Settings) -> dict[int | str, str]:
    """The names of those who run at home, by their k: plain decoding, `settings.k`, and those of the sweep."""
    names: dict[int | str, str] = {0: PLAIN, settings.k: SPECULATIVE}
    return names | {k: f"k={k}" for k in settings.sweep.k if k not in names}


def sweeps(
    settings: Settings, samples: Mapping[Condition, Sequence[Sample]], roofline: Roofline
) -> dict[str, list[dict[str, Any]]]:
    """The figures along each axis, in the order of its values."""
    start, names = default_condition(settings), speculative_variants(settings)
    found: dict[str, list[dict[str, Any]]] = {}
    if settings.sweep.k:
        figures = {k: compare(samples[start], name=names[k]) for k in settings.sweep.k}
        found["k"] = [_entry(k, figures[k], start, samples[start], roofline) for k in sorted(figures)]
    for axis, along in axes(settings).items():
        found[axis] = [
            _entry(value, compare(samples[place]), place, samples[place], roofline)
            for value, place in sorted(along.items())
        ]
    return found


def _entry(
    value: float, figures: Mapping[str, Any], place: Condition, samples: Sequence[Sample], roofline: Roofline
) -> dict[str, Any]:
    overall = figures[OVERALL]
    return {
        "value": value,
        **overall,
        "speedup_by_category": {name: each[SPECULATIVE]["speedup"] for name, each in figures.items()},
        "limits": limits(roofline, overall, rows=place.batch, cached=mean_cached(samples, rows=place.batch)),
    }
