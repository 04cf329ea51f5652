"""Options are derived from the fields of settings records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.derive import spread
from outrider.core.option import MODEL, Option, field_help


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
