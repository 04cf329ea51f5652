"""How the fields of a settings record are options of the command line.

A settings record is a dataclass. The name, type and default of an option are those of a field, and
its help is the docstring below the field. `Option` in `Annotated` adds what they cannot say. A
field that is a record itself has its own options; `Shown` chooses some of them.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

# Titles of groups of options that several commands have.
MODEL, LIMITS, SERVER = "Models", "Limits", "Server"
MEASURE, SAMPLING, OUTPUT = "Measuring", "Sampling", "Output"


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
    """Makes the value of the field from the option's name and text. Default: by the type."""
    argument: bool = False
    """Whether it is an argument."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Which fields of a record inside another record are options there. The others keep their defaults."""

    names: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Additions to the help of options, by name."""
    config: bool = False
    """Whether a file of `--config` gives values of the record, too."""


PYTHON_ONLY = Shown()
"""Marks a field that is not an option."""


def as_json(record: Any) -> dict[str, Any]:
    """Return the values of a record by the names of their options, for JSON.

    Fields of a record inside the record stand beside its own, if they are options.
    """
    hints = get_type_hints(type(record), include_extras=True)
    values: dict[str, Any] = {}
    for name, value in asdict(record).items():
        extra = next(iter(getattr(hints[name], "__metadata__", ())), None)
        if isinstance(extra, Shown) and extra is not PYTHON_ONLY:
            values |= {each: value[each] for each in extra.names}
        else:
            flags = extra.flags if isinstance(extra, Option) else None
            values[option_name(flags) if flags else name] = value
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def option_name(flags: str) -> str:
    """Return the name of an option: "max_num_seqs" for --max-num-seqs."""
    return flags.partition("/")[0].removeprefix("--").replace("-", "_")


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
