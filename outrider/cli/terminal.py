"""A conversation on a terminal: what the user types, and what Ctrl-C does."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGINT, default_int_handler, signal
from types import FrameType

from rich.console import Console

from outrider.errors import OutriderError

_WELCOME = "type a prompt; Ctrl-D or an empty line leaves"
_LEAVE = "Ctrl-C again leaves; so do Ctrl-D and an empty line"
_ENDING = b"\nthe answer ends after this pass of the model; Ctrl-C once more ends the program\n"


def typed(prompt: str | None) -> Iterator[str]:
    """Yield the argument, or the text of a pipe, or the lines that a user types, until an empty line or the end."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        try:
            yield sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise OutriderError("standard input is not UTF-8 text; give the prompt as text") from error
    else:
        with suppress(ImportError):  # gives `input` a history and line editing, if available
            import readline  # noqa: F401
        Console(stderr=True).print(_WELCOME, style="dim", highlight=False)
        while text := ask():
            yield text


def ask() -> str:
    """Return a line of the user, or "" at the end of the input. Ctrl-C drops the line, and twice in a row it ends."""
    stderr = Console(stderr=True)
    interrupted = False
    while True:
        try:
            return input("> " if sys.stdout.isatty() else "")
        except EOFError:
            stderr.print()
            return ""
        except KeyboardInterrupt:
            stderr.print()
            if interrupted:
                return ""
            interrupted = True
            stderr.print(_LEAVE, style="dim", highlight=False)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list of the Ctrl-C so far. The first ends the answer, the second warns, the third ends the program."""
    collected: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        collected.append(number)
        if len(collected) > 1:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _ENDING)
            signal(SIGINT, default_int_handler)

    previous = signal(SIGINT, record)
    try:
        yield collected
    finally:
        signal(SIGINT, previous)
