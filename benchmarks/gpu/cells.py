"""Answer the open questions about a GPU in one run of some minutes.

benchmarks/gpu/short.sh OUT_DIR                                                              # on a GPU
python benchmarks/gpu/cells.py OUT.json --device cpu --like tiny --dtype float32   # try it without one

The models are a small trained pair (the embedded one, unless --target and --draft name another). They are inflated to
the dimensions of Llama 3 8B and 1B, so that they generate the same text at the cost of the large models.

catalog.py lists the cells and their order. Each has its own time limit: one that fails or takes too long leaves the
others as they are. OUT.json is written after each, so a run that is cut short still has the first ones. page.py makes a
page of it.
"""

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from catalog import DTYPES, SIZES, after_load_failed, chosen_cells, default_cells, group_of, with_models
from start_worker import start

_LIMIT = 480.0  # seconds of the whole run
_START = 90.0  # most seconds until a process has imported its packages
GRACE = 10.0  # seconds after its limit at which the process of a cell is ended


def main(
    out: Annotated[Path, typer.Argument(help="JSON file for the results.")],
    *,
    target: Annotated[Path | None, typer.Option(help="Small trained Llama. Default: the embedded one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft model. Default: the embedded one.")] = None,
    like: Annotated[str, typer.Option(help="8b (the draft is then like 1b) or tiny (as they are).")] = "8b",
    device: str = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    cells: Annotated[str, typer.Option(help="Cells or groups, such as triton,graphs:step. Default: all.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines. Default: one of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seconds: Annotated[float, typer.Option(help="Limit of the whole run.")] = _LIMIT,
) -> None:
    """Run the cells and write their results."""
    if like not in SIZES or dtype not in DTYPES:
        raise typer.BadParameter(f"{like} or {dtype} is unknown; use {', '.join(SIZES)}, and {', '.join(DTYPES)}")
    try:
        names = chosen_cells(cells) if cells else default_cells()
    except KeyError as error:
        raise typer.BadParameter(f"cell {error} is unknown; catalog.py lists the cells") from error
    options = {
        "target": target,
        "draft": draft,
        "like": like,
        "device": device,
        "dtype": dtype,
        "prompts": prompts,
        "max_tokens": max_tokens,
    }
    Run(out=out, options=options, end=monotonic() + seconds).run(names)


@dataclass(kw_only=True)
class Run:
    """The results of a run so far, and the time at which it ends."""

    out: Path
    options: dict[str, Any]  # of a worker
    end: float
    results: dict[str, Any] = field(default_factory=dict)  # by cell
    facts: dict[str, Any] = field(default_factory=dict)

    def seconds_left(self) -> float:
        """Return the seconds until the run ends."""
        return self.end - monotonic()

    def run(self, names: Sequence[str]) -> None:
        """Run cells, and note those for which no time is left."""
        left = with_models(names)
        while left and self.seconds_left() > 0:
            left = with_models(self.watch(left))
        for name in left:
            self.note(name, {"skipped": "no time is left"})

    def watch(self, cells: Sequence[str]) -> list[str]:
        """Start a process for some cells, and return those that are left when it has ended."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=start, args=(sender, self.options, list(cells), self.end), daemon=False)
        process.start()
        sender.close()
        left = list(cells)
        try:
            while left and self._await_cell(receiver, left):
                left = left[1:]
        except _WorkerEnded as end:
            left = self._without_failed(left, str(end))
        finally:
            process.kill()
            process.join()
        return left

    def _await_cell(self, receiver: Connection, left: Sequence[str]) -> bool:
        """Wait for the next cell. Return False if the process cannot go on.

        Raises:
            _WorkerEnded: the process has ended, or took too long.
        """
        limit = _START
        while True:
            if not receiver.poll(min(limit, max(self.seconds_left(), 0) + GRACE)):
                raise _WorkerEnded("its process did not answer in time")
            try:
                kind, content = receiver.recv()
            except EOFError:
                raise _WorkerEnded("its process ended; the log has its last lines") from None
            if kind == "facts":
                self.facts = content
            elif kind == "begun":
                limit = content + GRACE
            elif kind == "stopped":
                return False
            else:
                self.note(left[0], content)
                return True

    def _without_failed(self, left: Sequence[str], reason: str) -> list[str]:
        """Note the failure of the first cell that is left, and return the others that can run."""
        name, *others = left
        self.note(name, {"error": f"WorkerEnded: {reason}"})
        if not self.facts:  # it has not even imported its packages
            return []
        if name == f"{group_of(name)}:load":
            return after_load_failed(others, group_of(name))
        return others

    def note(self, name: str, outcome: dict[str, Any]) -> None:
        """Keep and show the outcome of a cell."""
        self.results[name] = outcome
        document = {
            "benchmark": "gpu cells",
            "date": datetime.now(UTC).date().isoformat(),
            "options": self.options,
            **self.facts,
            "cells": self.results,
        }
        self.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
        message = outcome.get("error") or outcome.get("skipped") or ""
        print(f"{name:24} {outcome.get('seconds', 0.0):6.1f} s  {message}", flush=True)


class _WorkerEnded(Exception):
    """The process of the cells has ended."""


if __name__ == "__main__":
    typer.run(main)
