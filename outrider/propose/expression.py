"""Rewrite proposer expressions for people, for the command line and for files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.loader.embedded import embedded
from outrider.loader.gguf.file import is_gguf
from outrider.propose.registry import COMBINATIONS, Expression, parse


def short(proposer: str) -> str:
    """Return the expression with only the last part of each folder, for display."""
    return _render(parse(proposer), _short_argument)


def command_line_form(proposer: str) -> str:
    """Return the expression as a user would write it, with @NAME for a model that comes with Outrider."""
    return _render(parse(proposer), _use_embedded_name)


def absolute(proposer: str) -> str:
    """Return the expression with absolute folders, which does not depend on the current folder."""
    return _render(parse(proposer), _make_absolute)


def folder_of(argument: str) -> tuple[Path, str] | None:
    """Return the folder that an argument names, and the rest of the argument. None if it names no folder.

    The argument of `retrieval` may end in a colon and a number after the folder.
    """
    head, colon, tail = argument.rpartition(":")
    for text, rest in ((argument, ""), (head, colon + tail)):
        if text and ((path := Path(text).expanduser()).is_dir() or (is_gguf(path) and path.is_file())):
            return path, rest
    return None


def _short_argument(argument: str) -> str:
    argument = _use_embedded_name(argument)
    return Path(argument).name if "/" in argument else argument


def _use_embedded_name(argument: str) -> str:
    path = Path(argument)
    return f"@{path.name}" if path.parent == embedded("mini").parent else argument


def _make_absolute(argument: str) -> str:
    folder = folder_of(argument)
    return f"{folder[0].resolve()}{folder[1]}" if folder else argument


def _render(expression: Expression, change: Callable[[str], str]) -> str:
    """Return the text of an expression after applying `change` to each argument."""
    if expression.name in COMBINATIONS and expression.parts:
        return f"{expression.name}({','.join(_render(part, change) for part in expression.parts)})"
    if not expression.argument:
        return expression.name
    argument = change(expression.argument)
    quote = '"' if any(letter in argument for letter in ",()") else ""
    return f"{expression.name}:{quote}{argument}{quote}"
