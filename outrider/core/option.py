"""How the fields of a settings record are options of the command line.

A settings record is a dataclass. The name, type and default of an option are those of a field, and its help is the
docstring below the field. `Option` in `Annotated` adds what they cannot say. A field that is a record itself has its
own options; `Shown` chooses some of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

# Titles of groups of options that several commands have.
MODEL, MEASURE, SAMPLING, SERVER, OUTPUT = "Models", "Measuring", "Sampling", "Server", "Output"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line, or an argument."""

    metavar: str | None = None
    """How the help names the value. Default: by the type."""
    panel: str | None = None
    """Title of the group in the help. Default: "Options"."""
    flags: str | None = None
    """The option. Default: the name of the field, and --no-NAME for one that is on by default."""
    min: float | None = None
    max: float | None = None
    parse: Callable[[str, str], Any] | None = None
    """Makes the value of the field from the option and its text. Default: by the type."""
    argument: bool = False
    """Whether it is an argument."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The fields of a record inside another record that are options there."""

    names: tuple[str, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the help of an option says in addition, by name."""


def flat(record: Any) -> dict[str, Any]:
    """Return the fields of a record for JSON. Those of its `engine` stand beside its own."""
    values = asdict(record)
    return {**values.pop("engine", {}), **values}


def field_help(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and of its bases, in one line each."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _docstrings(base.__module__).get(base.__qualname__, {})
    return texts


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields in a module, by class and field. Python keeps those of classes only."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, dict[str, str]] = {}
    for body in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        texts = found.setdefault(body.name, {})
        for statement, after in zip(body.body, body.body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return found
