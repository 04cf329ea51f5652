"""The conditions of a sweep: one axis varies at a time, and the other axes keep their first value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.lab.bench.limits import Roofline, limits
from outrider.lab.bench.report import OVERALL, PLAIN, SPECULATIVE, Sample, compare, mean_cached
from outrider.lab.bench.settings import Settings
from outrider.lab.common.jobs import Condition


def default_condition(settings: Settings) -> Condition:
    """Return the condition in which every axis has its first value."""
    return Condition(batch=settings.batch, temperature=settings.temperature)


def axes(settings: Settings) -> dict[str, dict[float, Condition]]:
    """Return the conditions of each swept axis, by the axis value.

    The axis k has no entry, because all its values are measured in the default condition.
    """
    default = default_condition(settings)
    sweep = settings.sweep
    by_axis: dict[str, dict[float, Condition]] = {
        "batch": {value: replace(default, batch=value) for value in sweep.batch},
        "context": {value: replace(default, context=value) for value in sweep.context},
        "temperature": {value: replace(default, temperature=value) for value in sweep.temperature},
    }
    return {axis: by_value for axis, by_value in by_axis.items() if by_value}


def conditions(settings: Settings) -> list[Condition]:
    """Return all distinct conditions, the default condition first."""
    swept = [condition for by_value in axes(settings).values() for condition in by_value.values()]
    return list(dict.fromkeys([default_condition(settings), *swept]))


def speculative_variants(settings: Settings) -> dict[int | str, str]:
    """Return the names of the variants in the default condition, by k.

    They are plain decoding, the k of the engine and the values of k in the sweep.
    """
    names: dict[int | str, str] = {0: PLAIN, settings.engine.k: SPECULATIVE}
    return names | {k: f"k={k}" for k in settings.sweep.k if k not in names}


def sweeps(
    settings: Settings, samples: Mapping[Condition, Sequence[Sample]], roofline: Roofline
) -> dict[str, list[dict[str, Any]]]:
    """Return the figures along each axis, in the order of its values."""
    default = default_condition(settings)
    names = speculative_variants(settings)
    by_axis: dict[str, list[dict[str, Any]]] = {}
    if settings.sweep.k:
        figures = {k: compare(samples[default], name=names[k]) for k in settings.sweep.k}
        by_axis["k"] = [_entry(k, figures[k], default, samples[default], roofline) for k in sorted(figures)]
    for axis, by_value in axes(settings).items():
        by_axis[axis] = [
            _entry(value, compare(samples[condition]), condition, samples[condition], roofline)
            for value, condition in sorted(by_value.items())
        ]
    return by_axis


def _entry(
    value: float, figures: Mapping[str, Any], condition: Condition, samples: Sequence[Sample], roofline: Roofline
) -> dict[str, Any]:
    overall = figures[OVERALL]
    cached = mean_cached(samples, seqs=condition.batch)
    return {
        "value": value,
        **overall,
        "speedup_by_category": {name: each[SPECULATIVE]["speedup"] for name, each in figures.items()},
        "limits": limits(roofline, overall, seqs=condition.batch, cached=cached),
    }
