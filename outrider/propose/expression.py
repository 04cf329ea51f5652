"""Proposers' expressions, spelled otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.loader.embedded import embedded
from outrider.propose.registry import COMBINATIONS, Expression, parse


def short(proposer: str) -> str:
    """With the last part of each folder alone, for people who know theirs."""
    return _spelled(parse(proposer), lambda argument: Path(argument).name if "/" in _own(argument) else _own(argument))


def pasted(proposer: str) -> str:
    """As a user would write it: @NAME for a model that comes with Outrider."""
    return _spelled(parse(proposer), _own)


def absolute(proposer: str) -> str:
    """With folders from the root, so that it means the same wherever it is read."""
    return _spelled(parse(proposer), _from_root)


def folder_of(argument: str) -> tuple[Path, str] | None:
    """The folder that an argument names, if it does, and what stands behind it: a datastore's may end in a number."""
    head, colon, tail = argument.rpartition(":")
    for text, rest in ((argument, ""), (head, colon + tail)):
        if text and (path := Path(text).expanduser()).is_dir():
            return path, rest
    return None


def _own(argument: str) -> str:
    path = Path(argument)
    return f"@{path.name}" if path.parent == embedded("mini").parent else argument


def _from_root(argument: str) -> str:
    folder = folder_of(argument)
    return f"{folder[0].resolve()}{folder[1]}" if folder else argument


def _spelled(expression: Expression, change: Callable[[str], str]) -> str:
    if expression.name in COMBINATIONS and expression.parts:
        return f"{expression.name}({','.join(_spelled(part, change) for part in expression.parts)})"
    if not expression.argument:
        return expression.name
    argument = change(expression.argument)
    quote = '"' if any(letter in argument for letter in ",()") else ""
    return f"{expression.name}:{quote}{argument}{quote}"
