"""The progress of a measurement: a bar on a terminal, and a line for each run elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console) -> Progress:
    """Return a bar with a description, the completed runs and the remaining time. It is only shown on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class RunProgress:
    """Shows which runs of a measurement are done."""

    def __init__(self, console: Console, total: int) -> None:
        """Show `total` runs on a console."""
        self._console = console
        self._total = total
        self._done = 0
        self._description = ""
        self._bar = progress_bar(console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def describe(self, description: str) -> None:
        """Say what the next runs have in common."""
        self._description = description
        self._bar.update(self._task, description=description)

    def advance(self, name: str, tokens_per_s: float) -> None:
        """Count a run, with what was measured."""
        self._done += 1
        self._bar.advance(self._task)
        if not self._console.is_terminal:
            line = f"{self._done} of {self._total}: {self._description}, {name}: {tokens_per_s:.0f} tokens/s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def skip(self, count: int) -> None:
        """Count runs that an earlier command has done."""
        self._done += count
        self._bar.advance(self._task, count)
