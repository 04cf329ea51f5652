"""Stages of work on a console: a bar on a terminal, and a few lines elsewhere."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from time import perf_counter
from typing import Any

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from outrider.runtime.progress import Stage, shown_on

HIDDEN_SECONDS = 0.5  # shorter work shows no bar
LINE_SECONDS = 5.0  # before the first line about a stage, and between two lines
_LINES = 10  # at most, about one stage
_SHARES = 1  # the total of a stage whose unit is the whole work
_BAR_WIDTH = 20  # characters


@contextmanager
def shown_on_stderr() -> Iterator[None]:
    """Show the stages of the body on standard error. Of several ranks, which torchrun starts, only the first does."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with shown_on(StageBar(Console(stderr=True))):
        yield


class StageBar:
    """Shows the innermost stage on a console."""

    def __init__(self, console: Console, log: Callable[[str], None] | None = None) -> None:
        """Show stages on a console.

        Args:
            console: where a bar is shown, if it is a terminal.
            log: writes a line where there is no terminal; None: it is printed on the console.
        """
        self.stages: list[Stage] = []  # those that are open, the innermost last
        self._console = console
        self._log = log or self._print
        self._bar: _Bar | None = None
        self._tasks: dict[Stage, Any] = {}
        self._lines: dict[Stage, tuple[float, int]] = {}  # time of the next line, and lines so far
        self._timers: dict[Stage, Timer] = {}  # which print an announcement

    def begin(self, stage: Stage) -> None:
        self.stages.append(stage)
        if not self._console.is_terminal:
            self._lines[stage] = perf_counter() + LINE_SECONDS, 0
            if stage.announcement:
                self._timers[stage] = Timer(LINE_SECONDS, self._log, [stage.announcement + stage.hint])
                self._timers[stage].start()
            return
        if self._bar is None:
            self._bar = _Bar(self._console)
            self._bar.start()
        self._show(None)
        self._tasks[stage] = self._bar.add_task(
            stage.title + stage.hint, total=stage.total, counts_bytes=stage.counts_bytes
        )

    def update(self, stage: Stage, line: str) -> None:
        if self._bar is not None:
            self._bar.update(self._tasks[stage], completed=stage.done, description=stage.title + stage.hint)
        elif line:
            self._log(line)
        elif stage.counts_bytes and stage.total:
            self._log_share(stage, stage.done / stage.total)

    def _log_share(self, stage: Stage, share: float) -> None:
        due, lines = self._lines[stage]
        if perf_counter() >= due and lines <= int(_LINES * share) and share < 1:
            self._lines[stage] = perf_counter() + LINE_SECONDS, int(_LINES * share) + 1
            self._log(f"{stage.title}: {share:.0%} of {decimal(int(stage.total or 0))}")

    def say(self, line: str) -> None:
        self._log(line) if self._bar is None else self._print(line)

    def end(self, stage: Stage) -> None:
        self.stages.remove(stage)
        self._lines.pop(stage, None)
        if timer := self._timers.pop(stage, None):
            timer.cancel()
        if self._bar is None:
            return
        self._bar.remove_task(self._tasks.pop(stage))
        if self.stages:
            self._show(self.stages[-1])
        else:
            self._bar.stop()
            self._bar = None

    def _show(self, shown: Stage | None) -> None:
        assert self._bar is not None
        for stage, task in self._tasks.items():
            self._bar.update(task, visible=stage is shown)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Share(BarColumn):
    """A bar, if the total of a stage is known."""

    def render(self, task: Task) -> Any:
        return Text() if task.total is None else super().render(task)


class _Amount(TextColumn):
    """The amount that is done, and the total: bytes, or a number."""

    def __init__(self) -> None:
        super().__init__("")
        self._bytes = DownloadColumn()
        self._number = MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        if task.total is None or task.total == _SHARES:
            return Text()
        return self._bytes.render(task) if task.fields["counts_bytes"] else self._number.render(task)


class _Time(TextColumn):
    """The remaining time of a stage, or the elapsed time if its total is unknown."""

    def __init__(self) -> None:
        super().__init__("")
        self._remaining = TimeRemainingColumn()
        self._elapsed = TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        return (self._elapsed if task.total is None else self._remaining).render(task)


class _Bar(Progress):
    """A bar that appears after `HIDDEN_SECONDS` and leaves nothing behind."""

    def __init__(self, console: Console) -> None:
        self._appears = perf_counter() + HIDDEN_SECONDS
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Share(_BAR_WIDTH),
            _Amount(),
            _Time(),
        )
        # Standard output stays on standard output, even while the bar is on standard error.
        super().__init__(*columns, console=console, transient=True, redirect_stdout=False)

    def get_renderables(self) -> Iterable[RenderableType]:
        if perf_counter() >= self._appears:
            yield from super().get_renderables()
