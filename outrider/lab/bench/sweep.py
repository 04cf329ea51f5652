"""The conditions of a sweep: one axis varies at a time, and the other axes keep their first value."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.lab.bench.figures import OVERALL, Comparison
from outrider.lab.bench.limits import Limits
from outrider.lab.bench.settings import Settings
from outrider.lab.common.jobs import Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one draft length in one condition."""

    by_category: dict[str, Comparison]
    limits: Limits  # of all categories

    @property
    def overall(self) -> Comparison:
        """The figures of all categories."""
        return self.by_category[OVERALL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The figures at one value of a swept axis."""

    value: float
    measured: Measured

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for JSON."""
        speedups = {name: each.speculative.speedup for name, each in self.measured.by_category.items()}
        return {
            "value": self.value,
            **self.measured.overall.as_dict(),
            "speedup_by_category": {name: spread and asdict(spread) for name, spread in speedups.items()},
            "tau_by_category": {name: each.speculative.stats.tau for name, each in self.measured.by_category.items()},
            "limits": asdict(self.measured.limits),
        }


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


def draft_lengths(settings: Settings, condition: Condition) -> tuple[int | str, ...]:
    """Return each k that is measured in a condition: plain decoding, that of the engine, and by default the swept."""
    swept = settings.sweep.k if condition == default_condition(settings) else ()
    return tuple(dict.fromkeys((0, settings.engine.k, *swept)))


def sweeps(settings: Settings, measured: Callable[[Condition, int | str], Measured]) -> dict[str, list[Entry]]:
    """Return the figures along each axis, in the order of its values.

    Args:
        settings: the axes.
        measured: returns the figures of a condition and a draft length.
    """
    default = default_condition(settings)
    by_axis: dict[str, list[Entry]] = {}
    if settings.sweep.k:
        by_axis["k"] = [Entry(value=k, measured=measured(default, k)) for k in sorted(settings.sweep.k)]
    for axis, by_value in axes(settings).items():
        by_axis[axis] = [
            Entry(value=value, measured=measured(condition, settings.engine.k))
            for value, condition in sorted(by_value.items())
        ]
    return by_axis
