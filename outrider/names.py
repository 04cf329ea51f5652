"""Proposers' expressions, spelled otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.embedded import embedded
from outrider.proposers import COMBINATIONS, Expression, parse


def short(proposer: str) -> str:
    """With the last part of each folder alone, for people who know theirs."""
    return _spelled(parse(proposer), lambda argument: Path(argument).name if "/" in _own(argument) else _own(argument))


def pasted(proposer: str) -> str:
    """As a user would write it: @NAME for a model that comes with Outrider."""
    return _spelled(parse(proposer), _own)


def absolute(proposer: str) -> str:
    """With folders from the root, so that it means the same wherever it is read."""
    return _spelled(parse(proposer), _from_root)


def _own(argument: str) -> str:
    path = Path(argument)
    return f"@{path.name}" if path.parent == embedded("mini").parent else argument


def _from_root(argument: str) -> str:
    head, colon, tail = argument.rpartition(":")
    if colon and Path(head).expanduser().is_dir():  # a datastore's may end in a number
        return f"{Path(head).expanduser().resolve()}:{tail}"
    path = Path(argument).expanduser()
    return str(path.resolve()) if argument and path.is_dir() else argument


def _spelled(expression: Expression, change: Callable[[str], str]) -> str:
    if expression.name in COMBINATIONS and expression.parts:
        return f"{expression.name}({','.join(_spelled(part, change) for part in expression.parts)})"
    if not expression.argument:
        return expression.name
    argument = change(expression.argument)
    quote = '"' if any(letter in argument for letter in ",()") else ""
    return f"{expression.name}:{quote}{argument}{quote}"
