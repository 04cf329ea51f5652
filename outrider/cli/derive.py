"""Makes the options of a command from the fields of its settings records; see `outrider.core.option`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import reduce, wraps
from inspect import Parameter, Signature, signature
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from outrider.cli.environment import with_variable
from outrider.core.option import Option, field_help

_NOT_FOR_TEXT = (NoneType, Path)  # a text on the command line stands for them


def spread(command: Callable[..., None], *, environment: bool = True) -> Callable[..., None]:
    """Let typer show each field of the dataclass parameters of a command as an option.

    Args:
        command: the function of the command.
        environment: whether its options have environment variables.
    """
    flat: list[Parameter] = []
    records: dict[str, type[Any]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            records[parameter.name] = hint
            flat += _parameters(hint)
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
    if environment:
        flat = [each.replace(annotation=with_variable(each.name, each.annotation)) for each in flat]

    @wraps(command)
    def call(**given: Any) -> None:
        for name, kind in records.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _parameters(kind: type[Any]) -> Iterator[Parameter]:
    """Yield the parameters of a record's fields, for typer."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if not any(isinstance(extra, typer.models.ParameterInfo) for extra in get_args(hint)):
            hint = _annotation(field, hint, field_help(kind).get(field.name, ""))
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _annotation(field: Field[Any], hint: Any, text: str) -> Any:
    """Return the type of an option and what typer shows of it."""
    value, option = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Option())
    flags = option.flags or f"--{field.name.replace('_', '-')}"
    shown: dict[str, Any] = {
        "metavar": option.metavar,
        "help": text.replace("[", r"\["),
        "rich_help_panel": option.panel,
    }
    if option.argument:
        return Annotated[value, typer.Argument(**shown)]
    if field.default is True and option.flags is None:
        flags = f"{flags}/--no-{flags[2:]}"
    return Annotated[_text_type(value), typer.Option(flags, **shown, min=option.min, max=option.max)]


def _text_type(value: Any) -> Any:
    """Return the type of a value on the command line."""
    if get_origin(value) not in (Union, UnionType):
        return value
    kinds = [kind for kind in get_args(value) if kind not in _NOT_FOR_TEXT]
    return reduce(or_, kinds) if NoneType not in get_args(value) else reduce(or_, [*kinds, None])
