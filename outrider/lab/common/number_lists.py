"""Parse lists and ranges of numbers of the command line."""

from collections.abc import Callable
from typing import TypeVar

from outrider.errors import OutriderError

_MAX_VALUES = 64  # longer lists are typing errors in a range
_REAL_FORM = "numbers such as 0,0.7,1"

_Number = TypeVar("_Number", int, float)


def parse_whole(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list with ranges, each one once: "0..2,8" is (0, 1, 2, 8).

    Raises:
        OutriderError: `text` does not have this form.
    """
    return _parse(option, text, _range, "whole numbers such as 1,2,4 or 0..8")


def parse_real(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list, each one once: "0,0.7" is (0.0, 0.7).

    Raises:
        OutriderError: `text` does not have this form.
    """
    return _parse(option, text, lambda part: (float(part),), _REAL_FORM)


def parse_figures(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list whose places have a meaning: "0.8,0.8" is (0.8, 0.8).

    Raises:
        OutriderError: `text` does not have this form.
    """
    return _parse(option, text, lambda part: (float(part),), _REAL_FORM, distinct=False)


def sweep_values(values: tuple[_Number, ...]) -> tuple[_Number, ...]:
    """Return the values to sweep. A single value is not a sweep, so it gives ()."""
    return values if len(values) > 1 else ()


def _parse(
    option: str, text: str, parse_part: Callable[[str], tuple[_Number, ...]], form: str, *, distinct: bool = True
) -> tuple[_Number, ...]:
    try:
        values = tuple(value for part in text.split(",") for value in parse_part(part))
    except ValueError:
        values = ()
    if distinct:
        values = tuple(dict.fromkeys(values))
    if not 0 < len(values) <= _MAX_VALUES:
        raise OutriderError(f"{option} is {text!r}; use up to {_MAX_VALUES} {form}")
    return values


def _range(part: str) -> tuple[int, ...]:
    first, dots, last = part.partition("..")
    if not dots:
        return (int(first),)
    values = range(int(first), int(last) + 1)
    if not values or len(values) > _MAX_VALUES:
        raise ValueError(part)
    return tuple(values)
