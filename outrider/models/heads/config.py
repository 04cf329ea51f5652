"""Typed access to the values of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import OutriderError


class ConfigReader:
    """Reads the values of a config.json, or of an object inside one. null counts as missing.

    Without a default a missing value raises OutriderError, and so does a value of the wrong type.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "config.json") -> None:
        self._data = data
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._get(name, default, (int,)))

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.integer(name, default)
        if value < 1:
            raise OutriderError(f"{self._where} has {value} for {name!r}; correct it to a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, default, (int, float)))

    def boolean(self, name: str, default: bool | None = None) -> bool:
        return bool(self._get(name, default, (bool,)))

    def string(self, name: str, default: str | None = None) -> str:
        return str(self._get(name, default, (str,)))

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, or () if it is missing."""
        return tuple(map(str, self._get(name, [], (list, tuple))))

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or None if it is missing."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise OutriderError(f"{self._where} has {value!r} for {name!r}; correct it to a list of integers")
        return tuple(value)

    def object(self, name: str) -> ConfigReader:
        """Return a nested object, or an empty one if it is missing."""
        return ConfigReader(self._get(name, {}, (dict,)), f"{self._where}: {name}")

    def objects(self, name: str) -> list[ConfigReader]:
        """Return a list of nested objects, or an empty list if it is missing."""
        value = self._get(name, [], (list, tuple))
        if not all(isinstance(item, Mapping) for item in value):
            raise OutriderError(f"{self._where} has {value!r} for {name!r}; correct it to a list of objects")
        return [ConfigReader(item, f"{self._where}: {name}") for item in value]

    def _get(self, name: str, default: Any, types: tuple[type, ...]) -> Any:
        value = self._data.get(name)
        if value is None:
            value = default
        if value is None:
            raise OutriderError(f"{self._where} lacks {name!r}; copy the checkpoint again")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise OutriderError(
                f"{self._where} has {value!r} for {name!r}; correct it to a value of type {types[-1].__name__}"
            )
        return value
