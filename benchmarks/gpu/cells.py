"""Answer the open questions about a GPU in one run of at most 9 minutes.

python benchmarks/gpu/cells.py OUT.json                                      # on a GPU
python benchmarks/gpu/cells.py OUT.json --device cpu --like tiny --dtype float32   # try it without one

The models are a small trained pair (the embedded one, unless --target and --draft name another). They are inflated to
the dimensions of Llama 3 8B and 1B, so that they generate the same text at the cost of the large models. The
batch size is 1.
--inflated-target and --inflated-draft name models that benchmarks/gpu/inflate_model.py has written.

Each cell has its own time limit: one that fails or takes too long leaves the others as they are. OUT.json is written
after each, so a run that is cut short still has the first ones. The cells run in the order of this table.

| Cell | Question |
|---|---|
| bandwidth | bytes per second that the GPU reads |
| split | ms of drafting, of the target's pass and of the rest of a round, for k = 1, 2, 4, 8 |
| auto | what k auto chooses at several acceptances, and tokens/s beside plain decoding and fixed k |
| step | ms of a pass over 1 to 64 tokens, and its share of the bandwidth limit |
| round | ms of a round beyond the target's pass and the draft's steps |
| kernels | kernels of a pass, and the time between them |
| attention | us of the attention of few queries over long caches, and its share of the bandwidth limit |
| rows | whether a row of a matrix product depends on the number of rows |
| race | tokens/s of speculation and plain decoding; with --peers also of assisted generation of transformers |
| sampled | the parts of a round at temperature 1, by verifier, and with top-p |
| head | the parts of a round with an EAGLE-3 head of the target's dimensions |
| texts | greedy texts that differ from plain decoding, and where |
| memory | bytes at the peak, bytes of the graphs, and seconds of recording |
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Annotated, Any

import passes
import rounds
import typer
from pair import Setup, conditions, prepare, warm_up

from outrider import OutriderError
from outrider.models.loader.embedded import embedded

_LIMIT = 540.0  # seconds of the whole run


class CellTimeout(Exception):
    """The time of a cell has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question: what answers it, and the most seconds that this may take."""

    seconds: float
    run: Callable[[Setup], dict[str, Any]]


CELLS = {  # in the order in which they run
    "bandwidth": Cell(seconds=15, run=passes.bandwidth),
    "split": Cell(seconds=40, run=rounds.split),
    "auto": Cell(seconds=100, run=rounds.auto),
    "step": Cell(seconds=45, run=passes.step),
    "round": Cell(seconds=30, run=rounds.round_times),
    "kernels": Cell(seconds=20, run=passes.kernels),
    "attention": Cell(seconds=20, run=passes.attention),
    "rows": Cell(seconds=10, run=passes.rows),
    "race": Cell(seconds=60, run=rounds.race),
    "sampled": Cell(seconds=40, run=rounds.sampled),
    "head": Cell(seconds=50, run=rounds.head),
    "texts": Cell(seconds=30, run=rounds.texts),
    "memory": Cell(seconds=5, run=passes.memory),
}


def main(
    out: Annotated[Path, typer.Argument(help="JSON file for the results.")],
    *,
    target: Annotated[Path | None, typer.Option(help="Small trained Llama. Default: the embedded one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft model. Default: the embedded one.")] = None,
    inflated_target: Annotated[Path | None, typer.Option(help="Inflated target, used as it is.")] = None,
    inflated_draft: Annotated[Path | None, typer.Option(help="Inflated draft model, used as it is.")] = None,
    like: Annotated[str, typer.Option(help="8b (the draft is then like 1b) or tiny (as they are).")] = "8b",
    device: str = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    cells: Annotated[str, typer.Option(help="Cells to run. Default: all.")] = ",".join(CELLS),
    prompts: Annotated[Path | None, typer.Option(help="JSON lines. Default: one of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seconds: Annotated[float, typer.Option(help="Limit of the whole run.")] = _LIMIT,
    compiled: Annotated[bool, typer.Option(help="Compile the layers before recording.")] = True,
    peers: Annotated[bool, typer.Option(help="Measure transformers, too, in the race. It takes minutes.")] = False,
) -> None:
    """Run the cells and write their results."""
    names = cells.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        raise typer.BadParameter(f"{unknown[0]} is unknown; use {', '.join(CELLS)}")
    began = perf_counter()
    results: dict[str, Any] = {}
    try:
        setup = prepare(
            small=(target or embedded("mini"), draft or embedded("nano")),
            inflated=(inflated_target, inflated_draft),
            like=like,
            device=device,
            dtype=dtype,
            k=4,
            nodes=(1, 2, 4, 8, 16, 64),
            cached=256,
            rounds=2,
            prompts=prompts,
            max_tokens=max_tokens,
            with_peers=peers,
        )
    except OutriderError as error:
        raise typer.BadParameter(str(error)) from error
    results["loaded"] = {"seconds": perf_counter() - began}
    results["warm_up"] = _try(lambda: warm_up(setup, compiled), began + seconds - perf_counter())
    _write(out, results, setup)
    for name in names:
        limit = min(CELLS[name].seconds, began + seconds - perf_counter())
        results[name] = _try(lambda name=name: CELLS[name].run(setup), limit)  # type: ignore[misc]
        _write(out, results, setup)
        print(f"{name:10} {results[name]['seconds']:6.1f} s  {results[name].get('error', '')}", flush=True)


def _try(run: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return the result of a cell, or its error, with the seconds that it took."""
    began = perf_counter()
    try:
        with _time_limit(limit):
            result = {"result": run()}
    except Exception as error:  # a cell must not end the others
        result = {"error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": perf_counter() - began}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise CellTimeout after some seconds, between two operations of Python."""
    if seconds <= 0:
        raise CellTimeout("no time is left")

    def end(_number: int, _frame: FrameType | None) -> None:
        raise CellTimeout(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write(out: Path, results: dict[str, Any], setup: Setup) -> None:
    out.write_text(json.dumps({"benchmark": "gpu cells", **results, **conditions(setup)}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
