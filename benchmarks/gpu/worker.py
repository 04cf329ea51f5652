"""The process that runs cells. It makes the models once, and an engine for each group of cells.

A kernel that fails can leave the GPU unusable for its process, and one that never ends cannot be interrupted. So the
process that starts this one watches it, and starts another one for the cells that are left.
"""

import gc
import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch
from catalog import GROUPS, find, group_of
from pair import Inputs, Pair, Setup, set_up

from outrider import OutriderError
from outrider.runtime import machine

_CUDA_ERRORS = ("CUDA error", "CUDA driver error", "illegal memory access", "device-side assert")
_ROOT = Path(__file__).parents[2]
_AGAIN = 2.0  # seconds between the exceptions of a cell that takes too long


class CellTimeout(Exception):
    """The time of a cell has passed."""


def work(connection: Connection, inputs: Inputs, cells: Sequence[str], deadline: float) -> None:
    """Run cells and report each to `connection`.

    The messages are pairs: ("facts", of the machine), and for each cell ("begun", the seconds that it may take) and
    ("ended", its outcome). After ("stopped", None) no time is left, or the GPU has become unusable for this process.

    Args:
        connection: receives the messages.
        inputs: what the models are made from.
        cells: in the order in which they run, with the cell `load` of each group before its others.
        deadline: the time of `monotonic` at which the run ends.
    """
    connection.send(("facts", _facts(inputs.device)))
    worker = Worker(inputs)
    for name in cells:
        seconds = min(find(name).seconds, deadline - monotonic())
        if seconds <= 0:
            break
        connection.send(("begun", seconds))
        outcome = worker.run(name, seconds)
        connection.send(("ended", outcome))
        if any(sign in outcome.get("error", "") for sign in _CUDA_ERRORS):
            break
    connection.send(("stopped", None))


class Worker:
    """Runs cells one by one, and keeps the models for the next one."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._pair: Pair | None = None
        self._setup: Setup | None = None
        self._refused = ""  # why the models of the current group cannot be made

    def run(self, name: str, seconds: float) -> dict[str, Any]:
        """Return the result of a cell, or its error or why it is skipped, with the seconds that it took."""
        began = monotonic()
        try:
            with _time_limit(seconds):
                outcome = self._run(name)
        except Exception as error:  # a cell must not end the others
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {error}", "at": _place(error)}
            self._refused = self._refused or outcome["error"]
            _free_memory()  # that the frames of the error held
        return outcome | {"seconds": monotonic() - began}

    def _run(self, name: str) -> dict[str, Any]:
        module, _, function = find(name).run.partition(":")
        group = group_of(name)
        if group not in GROUPS:
            return _result_of(self._own(module, function))
        if name.endswith(":load"):
            self._load(group)
        if self._setup is None:
            return {"skipped": f"the models of {group} cannot be made: {self._refused}"}
        return _result_of(getattr(importlib.import_module(module), function)(self._setup))

    def _own(self, module: str, function: str) -> dict[str, Any]:
        """Run a cell that needs no models. Its file may be missing, or need a package that is missing."""
        if module == "tests_on_gpu":  # it starts processes with models of their own
            self._setup = self._pair = None
            _free_memory()
        try:
            run: Callable[[torch.device], dict[str, Any]] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            return {"skipped": f"{module}.py cannot be imported: {error}"}
        return run(self._inputs.device)

    def _load(self, group: str) -> None:
        """Make the engine of a group, and free that of the last one."""
        self._setup = None
        self._refused = ""
        _free_memory()
        self._pair = self._pair or Pair(self._inputs)
        try:
            self._setup = set_up(self._inputs, self._pair, GROUPS[group])
        except OutriderError as error:
            self._refused = str(error)


def _place(error: Exception) -> str:
    """Return the line of the repository that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT)]
    return f"{Path(own[-1].filename).relative_to(_ROOT)}:{own[-1].lineno}"


def _result_of(result: dict[str, Any]) -> dict[str, Any]:
    return result if result.keys() == {"skipped"} else {"result": result}


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise CellTimeout after some seconds, between two operations of Python."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise CellTimeout(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    # A compiler may take the first exception for its own, so others follow.
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _facts(device: torch.device) -> dict[str, Any]:
    modules = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("numpy", "triton")}
    return {
        "hardware": machine.hardware(str(device)),
        "versions": machine.versions() | {"cuda": torch.version.cuda} | modules,
        "commit": machine.commit(),
    }
