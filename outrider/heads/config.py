"""What a config.json says, asked for by name and type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import OutriderError


class Settings:
    """A config.json, or a table in one: values of the type asked for. null is as good as absent."""

    def __init__(self, data: Mapping[str, Any], where: str = "config.json") -> None:
        self._data, self._where = data, where

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None

    def whole(self, name: str, default: int | None = None) -> int:
        """An integer."""
        return int(self._get(name, default, (int,)))

    def size(self, name: str, default: int | None = None) -> int:
        """A positive one."""
        found = self.whole(name, default)
        if found < 1:
            raise OutriderError(f"{self._where} has {found} for {name!r}, which is no size; mend it")
        return found

    def real(self, name: str, default: float | None = None) -> float:
        """A number."""
        return float(self._get(name, default, (int, float)))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean."""
        return bool(self._get(name, default, (bool,)))

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        return str(self._get(name, default, (str,)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings; none where there is no list."""
        return tuple(str(each) for each in self._get(name, [], (list, tuple)))

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; None where there is none."""
        found = self._data.get(name)
        if found is None:
            return None
        if not isinstance(found, list | tuple) or not all(type(each) is int for each in found):
            raise OutriderError(f"{self._where} has {found!r} for {name!r} where a list of integers is expected")
        return tuple(found)

    def table(self, name: str) -> Settings:
        """An empty one where there is none."""
        return Settings(self._get(name, {}, (dict,)), f"{self._where}: {name}")

    def tables(self, name: str) -> list[Settings]:
        """A list of tables, empty where there is none."""
        found = self._get(name, [], (list, tuple))
        if not all(isinstance(each, Mapping) for each in found):
            raise OutriderError(f"{self._where} has {found!r} for {name!r} where a list of tables is expected; mend it")
        return [Settings(each, f"{self._where}: {name}") for each in found]

    def _get(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        found = self._data.get(name)
        found = default if found is None else found
        if found is None:
            raise OutriderError(f"{self._where} lacks {name!r}; copy the draft again")
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise OutriderError(
                f"{self._where} has {found!r} for {name!r} where {kinds[-1].__name__} is expected; mend it"
            )
        return found
