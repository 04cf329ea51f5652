"""Lists and ranges of numbers, as they are written on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outrider.errors import OutriderError

_MOST = 64  # values of a list: beyond it a range was surely mistyped

_Number = TypeVar("_Number", int, float)


def parse_whole(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers and ranges: "0..2,8" is (0, 1, 2, 8).

    Raises:
        OutriderError: the text is nothing of the kind.
    """
    return _parse(option, text, _range, "whole numbers such as 1,2,4 or 0..8")


def parse_real(option: str, text: str) -> tuple[float, ...]:
    """Numbers: "0,0.7" is (0.0, 0.7).

    Raises:
        OutriderError: the text is nothing of the kind.
    """
    return _parse(option, text, lambda part: (float(part),), "numbers such as 0,0.7,1")


def several(values: tuple[_Number, ...]) -> tuple[_Number, ...]:
    """What a list sweeps: a single value is no sweep."""
    return values if len(values) > 1 else ()


def _parse(option: str, text: str, read: Callable[[str], tuple[_Number, ...]], form: str) -> tuple[_Number, ...]:
    try:
        values = tuple(dict.fromkeys(value for part in text.split(",") for value in read(part)))
    except ValueError:
        values = ()
    if not 0 < len(values) <= _MOST:
        raise OutriderError(f"{option} is {text!r}; use up to {_MOST} {form}")
    return values


def _range(part: str) -> tuple[int, ...]:
    first, dots, last = part.partition("..")
    if not dots:
        return (int(first),)
    values = range(int(first), int(last) + 1)
    if not values or len(values) > _MOST:
        raise ValueError(part)
    return tuple(values)
