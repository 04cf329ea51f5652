"""The progress of a download: a bar on a terminal, and a line for each tenth elsewhere."""

from __future__ import annotations

import os
from time import perf_counter
from types import TracebackType
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils.tqdm import tqdm
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINES = 10  # of a download, without a terminal


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # as torchrun sets it; outrider.runtime would import torch


class SilentBar(tqdm):
    """A bar that huggingface_hub can update, and that shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    def update_transfer(self, size: float | None = 1) -> None:
        """Count bytes of the network, which `update` counts as bytes of the file as well."""

    def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None:
        """Show a rate of the network."""


class DownloadProgress:
    """Shows how much of a download is done. `HF_HUB_DISABLE_PROGRESS_BARS` hides it, and only one rank shows it."""

    def __init__(self, name: str, *, files: int, size: int) -> None:
        """Show the download of `size` bytes in a number of files."""
        self._console = Console(stderr=True, quiet=bool(constants.HF_HUB_DISABLE_PROGRESS_BARS) or not _is_first_rank())
        self._title = name
        self._size = size
        self._files = files
        self._done = 0.0
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(f"downloading {name}", total=size or None)
        add = self._add

        class FileBar(SilentBar):
            """Counts the bytes of one file."""

            def update(self, n: float | None = 1) -> None:
                add(n or 0)

        self.bar = FileBar

    def __enter__(self) -> DownloadProgress:
        self._began = perf_counter()
        files = "1 file" if self._files == 1 else f"{self._files} files"
        self._print(f"downloading {self._title}: {files}, {decimal(self._size)}")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if error is None:
            self._print(f"downloaded {self._title} in {perf_counter() - self._began:.0f} s")
        elif isinstance(error, KeyboardInterrupt):
            self._print(f"the download of {self._title} was interrupted; the same command downloads what is missing")

    def _add(self, size: float) -> None:
        """Count bytes. A download that starts again at an earlier byte subtracts them."""
        before = self._done
        self._done += size
        self._progress.update(self._task, completed=self._done)
        tenth = int(_LINES * self._done / self._size) if self._size else 0
        if not self._console.is_terminal and 0 < tenth < _LINES and tenth > int(_LINES * before / self._size):
            self._print(f"downloading {self._title}: {tenth / _LINES:.0%}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
