"""Progress of long work. Code opens a stage and counts in it, and a command displays the open stages.

Without a display, as in a program that uses `LLM`, a stage costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

_log = logging.getLogger("outrider")


@dataclass(slots=True, eq=False)
class Stage:
    """A part of the work."""

    title: str
    total: float | None = None  # None: unknown
    _: KW_ONLY
    counts_bytes: bool = False
    announcement: str = ""  # the line for a log without bars, if the stage takes long
    hint: str = ""  # what the user can do about it
    done: float = 0
    display: Display | None = None

    def advance(self, amount: float = 1, line: str = "") -> None:
        """Count what is done. `line` describes it for a log without bars."""
        self.done += amount
        if self.display is not None:
            self.display.update(self, line)

    def describe(self, title: str) -> None:
        """Replace the title."""
        self.title = title
        self.advance(0)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self.display is not None:
            self.display.say(line)


class Display(Protocol):
    """Shows stages. A stage may open within another one; the innermost is the one to show."""

    def begin(self, stage: Stage) -> None:
        """Show a new stage."""

    def update(self, stage: Stage, line: str) -> None:
        """Show what has changed."""

    def say(self, line: str) -> None:
        """Print a line."""

    def end(self, stage: Stage) -> None:
        """Show the stage around this one again, or nothing."""


_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def shown_on(display: Display) -> Iterator[None]:
    """Show the stages that open in the body. Other threads have displays of their own."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def is_shown() -> bool:
    """Return whether something shows the stages that open here."""
    return _display.get() is not None


@contextmanager
def stage(
    title: str, total: float | None = None, *, counts_bytes: bool = False, announcement: str = "", hint: str = ""
) -> Iterator[Stage]:
    """Open a stage for the body. The arguments are the fields of `Stage`."""
    display = _display.get()
    opened = Stage(title, total, counts_bytes=counts_bytes, announcement=announcement, hint=hint, display=display)
    if display is None:
        if announcement:
            _log.info("%s%s", announcement, hint)
        yield opened
        return
    display.begin(opened)
    try:
        yield opened
    finally:
        display.end(opened)
        opened.display = None
