"""Makes the options of a command from the fields of its settings records; see `outrider.core.option`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, reduce, wraps
from inspect import Parameter, Signature, signature
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from outrider.core.option import MODEL, Option, Shown, field_help, option_name

_PREFIX = "OUTRIDER_"  # of the environment variables of options
# Options that say what runs and where, and mean the same in all commands. Options of a single
# measurement have no variable, because a forgotten one would change its results.
_WITH_VARIABLE = (
    "target proposer config verifier device kernels quantize kv_dtype threads draft_window draft_quantize "
    "draft_candidates max_model_len host port served_model_name api_key api_keys tls_cert tls_key "
    "max_num_seqs max_queued_requests request_timeout allow_origin log_format shutdown_timeout"
)
_PYTHON_ONLY = (Callable, Mapping)  # kinds of values that have no text
_CONFIG = "config"
_DEFAULT = " Default: "  # begins the last sentence of a help text
_CONFIG_HELP = (
    "Read settings from a JSON file: fields of EngineConfig, or what `outrider tune --out` or"
    " `outrider fit` wrote. Options on the command line take precedence."
)


def spread(command: Callable[..., None], *, environment: bool = True) -> Callable[..., None]:
    """Return a command whose options are the fields of its dataclass parameters, for typer.

    Args:
        command: the function of the command. It may have a parameter `given`: the options on the command line.
        environment: whether its options have environment variables.
    """
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Record] = {}
    flat = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    takes_given = False
    for parameter in signature(command).parameters.values():
        if parameter.name == "given":
            takes_given = True
            continue
        record = Record.of(parameter.name, hints[parameter.name], parameter.default)
        records[parameter.name] = record
        flat += record.parameters()
    if environment:
        flat = [each.replace(annotation=_with_variable(each.name, each.annotation)) for each in flat]

    @wraps(command)
    def call(ctx: typer.Context, **values: Any) -> None:
        given = _given(ctx)
        arguments = {name: record.make(values, given) for name, record in records.items()}
        command(**arguments, **({"given": given} if takes_given else {}))

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.records = records  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _with_variable(name: str, kind: Any) -> Any:
    """Return the annotation of a parameter of a command, with the environment variable of its option if it has one."""
    if name not in _WITH_VARIABLE.split() or get_origin(kind) is not Annotated:
        return kind
    value, option, *others = get_args(kind)
    option = copy(option)  # commands share options
    option.envvar = _PREFIX + name.upper()
    return Annotated[(value, option, *others)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A field that is an option."""

    name: str
    kind: Any
    option: Option
    help: str
    default: Any  # MISSING: the option is required

    @property
    def flags(self) -> str:
        """The option, and what switches it off."""
        flags = self.option.flags or f"--{self.name.replace('_', '-')}"
        return f"{flags}/--no-{flags[2:]}" if self.default is True and self.option.flags is None else flags

    def parameter(self) -> Parameter:
        """Return the parameter, for typer."""
        shown: dict[str, Any] = {"metavar": self.option.metavar, "rich_help_panel": self.option.panel}
        shown["help"] = self.help.replace("[", r"\[")  # brackets in help texts are not markup
        info = typer.Argument(**shown)
        if not self.option.argument:
            info = typer.Option(self.flags, **shown, min=self.option.min, max=self.option.max)
        kind, default = _text_type(self.kind), self.default
        if self.option.parse is not None:
            default = _text(default)
            kind = str if isinstance(default, str) else str | None
            if self.kind == int | str:
                kind, info.parser = Any, str  # the reference calls it an integer or a name
        default = Parameter.empty if default is MISSING else default
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])

    def make(self, value: Any) -> Any:
        """Return the value of the field."""
        if self.option.parse is None or value is None:
            return self.default if value is None else value
        return self.option.parse(self.flags, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record whose fields are options, or records."""

    name: str
    kind: type[Any]
    default: Any  # MISSING: none
    shown: Shown | None  # None: all fields
    members: tuple[Leaf | Record, ...]

    @classmethod
    def of(cls, name: str, hint: Any, default: Any) -> Record:
        """Return the record of the parameter or field `name`, which has the type `hint`."""
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        shown = next((each for each in extras if isinstance(each, Shown)), None)
        default = MISSING if default is Parameter.empty else default
        hints = _hints(kind)
        members: list[Leaf | Record] = []
        for field in fields(kind):
            if shown is None or field.name in shown.names:
                value = _default(field) if default is MISSING else getattr(default, field.name)
                text = _help(field_help(kind).get(field.name, ""), shown.notes.get(field.name) if shown else None)
                if field.default is None and value is not None:
                    text = text.partition(_DEFAULT)[0]  # the default of the text explains None
                members += _members(field.name, hints[field.name], value, text)
        return cls(name=name, kind=kind, default=default, shown=shown, members=tuple(members))

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of the fields, for typer."""
        for member in self.members:
            if isinstance(member, Record):
                yield from member.parameters()
            else:
                yield member.parameter()
        if self.shown is not None and self.shown.config:
            leaf = Leaf(name=_CONFIG, kind=str | None, option=Option("FILE", MODEL), help=_CONFIG_HELP, default=None)
            yield leaf.parameter()

    def make(self, values: dict[str, Any], given: set[str]) -> Any:
        """Return the settings made from the values of the options. Raises OutriderError if a value is not allowed."""
        made: dict[str, Any] = {}
        for member in self.members:
            if isinstance(member, Record):
                made[member.name] = member.make(values, given)
            else:
                made[member.name] = member.make(values[member.name])
        if self.shown is not None and self.shown.config and values[_CONFIG] is not None:
            from outrider.cli.config_file import merge_config

            made = merge_config(made, values[_CONFIG], given=given)
        return self.kind(**made) if self.default is MISSING else replace(self.default, **made)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _members(name: str, hint: Any, default: Any, text: str) -> Iterator[Leaf | Record]:
    """Yield what a field is on the command line: an option, a record, or nothing."""
    kind, extra = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Option())
    if is_dataclass(kind):
        yield Record.of(name, hint, Parameter.empty if default is MISSING else default)
    elif isinstance(extra, Option):
        yield Leaf(name=name, kind=kind, option=extra, help=text, default=default)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _help(text: str, note: str | None) -> str:
    """Return the help of a field with a note before its default, or the default of the note."""
    if note is None:
        return text
    before, marker, default = text.partition(_DEFAULT)
    return f"{before} {note}" if _DEFAULT in note else f"{before} {note}{marker}{default}"


def _given(ctx: typer.Context) -> set[str]:
    """Return the names of the options on the command line, without environment variables."""
    names = set()
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            names.add(option_name(max(parameter.opts, key=len)))
    return names


def _text(value: Any) -> Any:
    """Return the text that stands for a default value on the command line."""
    if value is None or value is MISSING or value == ():
        return None if value == () else value
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text_type(kind: Any) -> Any:
    """Return the type of a value on the command line. A text stands for paths, callables and mappings."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = [each for each in get_args(kind) if each not in (NoneType, Path) and get_origin(each) not in _PYTHON_ONLY]
    return reduce(or_, kinds if NoneType not in get_args(kind) else [*kinds, None])
