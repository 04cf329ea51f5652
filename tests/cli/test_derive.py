"""Options are derived from the fields of settings records."""

import math
from dataclasses import MISSING, dataclass, fields
from functools import cache, wraps
from typing import Annotated, get_args

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.app import app as cli
from outrider.cli.derive import Leaf, spread
from outrider.cli.media import media
from outrider.core.config import EngineConfig
from outrider.core.option import MODEL, Option, field_help
from outrider.lab.loadgen.settings import Settings as LoadSettings
from outrider.media.command.settings import MediaSettings
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.fleet.options import FleetOptions
from outrider.tools.settings import ExportSettings, HeadSettings


@dataclass(frozen=True, kw_only=True)
class Base:
    """A record."""

    color: str = "red"
    """Color of the
    text [see there]."""


@dataclass(frozen=True, kw_only=True)
class Record(Base):
    """A record with a base."""

    files: Annotated[list[str] | None, Option("FILE", MODEL)] = None
    """Files."""
    size_gb: Annotated[float, Option(min=1.0)] = 2.0
    loud: bool = False
    short: bool = True
    to: Annotated[int, Option(flags="--until")] = 3


def invoke(*words):
    received = []

    def command(*, record: Record) -> None:
        """Do it."""
        received.append(record)

    command.__annotations__["record"] = Record
    app = typer.Typer()
    app.command()(spread(command))
    return CliRunner().invoke(app, words), received


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Record()),
        (["--color", "blue"], Record(color="blue")),
        (["--files", "a", "--files", "b"], Record(files=["a", "b"])),
        (["--size-gb", "3"], Record(size_gb=3.0)),
        (["--loud", "--no-short", "--until", "4"], Record(loud=True, short=False, to=4)),
    ],
)
def test_a_field_is_an_option(words, expected):
    result, received = invoke(*words)
    assert result.exit_code == 0, result.output
    assert received == [expected]


def test_help_is_the_docstring_of_the_field():
    assert field_help(Record) == {"color": "Color of the text [see there].", "files": "Files."}
    text = invoke("--help")[0].output
    assert "[see" in text
    assert "Models" in text


def test_bounds_are_checked():
    assert invoke("--size-gb", "0.5")[0].exit_code == 2


def commands():
    """Yield each command of the program with its records."""
    for prefix, program in (("", cli), ("media ", media)):
        for each in program.registered_commands:
            yield prefix + each.callback.__name__, each.callback


def leaves(record, path=()):
    """Yield the fields that are options, with the names that lead to them."""
    for member in record.members:
        if isinstance(member, Leaf):
            yield (*path, member.name), member
        else:
            yield from leaves(member, (*path, member.name))


OPTIONS = [
    pytest.param(callback, (name, *path), leaf, id=f"{command} {leaf.name}")
    for command, callback in commands()
    for name, record in callback.records.items()
    for path, leaf in leaves(record)
]


def words_of(leaf):
    """Return an option with a value that is not its default, and the value that the field gets."""
    if isinstance(leaf.default, bool):
        return leaf.flags.split("/")[-1:], not leaf.default
    kinds = get_args(leaf.kind) or (leaf.kind,)
    flags = [] if leaf.option.argument else [leaf.flags.partition("/")[0]]
    if leaf.option.parse is not None:
        text = "k=2" if flags == ["--sweep"] else "2"
        return [*flags, text], leaf.option.parse(flags[0], text)
    if bool in kinds:
        return flags, True
    if "list" in str(leaf.kind):
        return [*flags, "5"], [5 if "int" in str(leaf.kind) else "5"]
    high = math.inf if leaf.option.max is None else leaf.option.max
    number = next(each for each in (6, 1, 0.5) if (leaf.option.min or 0) <= each <= high and each != leaf.default)
    if int in kinds:
        return [*flags, str(int(number))], int(number)
    return [*flags, str(number)], float(number) if float in kinds else str(number)


@cache
def program_of(callback):
    """Return a command with the options of another one, and what it receives."""
    received = []
    program = typer.Typer()
    program.command()(spread(wraps(callback.__wrapped__)(lambda **given: received.append(given))))
    return typer.main.get_command(program), received


@pytest.mark.parametrize(("callback", "path", "leaf"), OPTIONS)
def test_every_option_reaches_its_field(callback, path, leaf, monkeypatch):
    for record in callback.records.values():
        for kind in kinds_of(record):  # a value alone need not be allowed
            monkeypatch.setattr(kind, "__post_init__", lambda self: None, raising=False)
    words, expected = words_of(leaf)
    for record in callback.records.values():
        for _, other in leaves(record):
            if other.default is MISSING and other is not leaf:
                words += words_of(other)[0]
    command, received = program_of(callback)
    command.main(words, standalone_mode=False)
    value = received.pop()[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    assert value == expected != leaf.default


def kinds_of(record):
    yield record.kind
    for member in record.members:
        if not isinstance(member, Leaf):
            yield from kinds_of(member)


def test_no_settings_record_repeats_a_field_of_the_engine():
    """`project` and `fleet` describe other machines, and a draft is a file of its own without an engine."""
    engine = {field.name for field in fields(EngineConfig)}
    allowed = {ProjectOptions, FleetOptions, LoadSettings, MediaSettings, HeadSettings, ExportSettings}
    kinds = {kind for _, callback in commands() for record in callback.records.values() for kind in kinds_of(record)}
    for kind in kinds - {EngineConfig}:
        if allowed.isdisjoint(kind.__mro__):
            assert engine.isdisjoint(field.name for field in fields(kind)), kind
