"""Variants of a test that the fast tests run, and those that only the slow tests run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """Parameters of a test. Those that are not in `fast` are slow. A tuple gives the values of several parameters."""
    params = []
    for value in values:
        marks = () if value in fast else pytest.mark.slow
        params.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return params
