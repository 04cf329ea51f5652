"""Answer the open questions about a GPU in one run of at most 9 minutes.

python benchmarks/gpu/cells.py OUT.json                                      # on a GPU
python benchmarks/gpu/cells.py OUT.json --device cpu --like tiny --dtype float32   # try it without one

Each cell has its own time limit: one that fails or takes too long leaves the others as they are. OUT.json is written
after each, so a run that is cut short still has the first ones. The cells run in the order of this table.

| Cell | Question |
|---|---|
| bandwidth | bytes per second that the GPU reads |
| split | ms of drafting, of the target's pass and of the rest of a round, for k = 1, 2, 4, 8 |
| auto | what k auto chooses at several acceptances, and tokens/s beside plain decoding and fixed k |
| step | ms of a pass over 1 to 64 tokens, and its share of the bandwidth limit |
| kernels | kernels of a pass, and the time between them |
| rows | whether a row of a matrix product depends on the number of rows |
| race | tokens/s of speculation and plain decoding |
| texts | greedy texts that differ from plain decoding, and where |
| memory | bytes at the peak, bytes of the graphs, and seconds of recording |
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from gpu import MEASUREMENTS, Setup, conditions, pass_over, prepare, warm_up
from torch.profiler import ProfilerActivity, profile

from outrider import LLM
from outrider.bench.rates import read_bandwidth
from outrider.bench.variants import OutriderRunner
from outrider.core.types import Batch, Draft, Needs, Request, Round
from outrider.engine.build import assemble, auto_planner
from outrider.loader.embedded import embedded
from outrider.plan.planner import FixedPlanner, Planner
from outrider.propose.base import Proposer

_LIMIT = 540.0  # seconds of the whole run
_LENGTHS = (1, 2, 4, 8)  # draft lengths of the split
_KEPT = (0.55, 0.8, 1.0)  # share of the draft tokens that is left as drafted
_FIXED = (0, 2, 4, 8)  # draft lengths beside k auto; 0: plain decoding
_ROWS = (2, 3, 5, 8, 16, 32, 64)  # rows of a product


class CellTimeout(Exception):
    """The time of a cell has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question: what answers it, and the most seconds that this may take."""

    seconds: float
    run: Callable[[Setup], dict[str, Any]]


class CorruptedDraft:
    """A proposer that replaces some draft tokens of another one by wrong ones, which lowers the acceptance.

    Drafting takes the time of the other proposer, and an upload. The wrong tokens depend on nothing but a seed.
    """

    def __init__(self, inner: Proposer, *, kept: float, vocab: int) -> None:
        self.needs: Needs = inner.needs
        self._inner = inner
        self._kept = kept
        self._vocab = vocab
        self._rng = random.Random(0)

    def admit(self, slot: int, request: Request) -> None:
        self._inner.admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        draft = self._inner.propose(batch)
        offsets = [[int(self._rng.random() >= self._kept) for _ in range(draft.size)] for _ in draft.width]
        moved = torch.tensor(offsets, dtype=torch.int64).view(draft.tokens.shape).to(draft.tokens.device)
        return replace(draft, tokens=(draft.tokens + moved) % self._vocab, accept_prob=None)

    def commit(self, round: Round) -> None:
        self._inner.commit(round)

    def release(self, slot: int) -> None:
        self._inner.release(slot)


def _bandwidth(setup: Setup) -> dict[str, Any]:
    return dict(read_bandwidth(setup.llm.parts.device))


def _split(setup: Setup) -> dict[str, Any]:
    """Return the parts of a round by draft length, as the statistics of the engine have them."""
    results = {}
    for k in _LENGTHS:
        runner = OutriderRunner(f"k = {k}", setup.llm, setup.planner, k=k)
        runner.run(setup.jobs[:1])  # records the draft of this length
        trial = runner.run(setup.jobs[:1])
        assert trial.stats is not None
        fields = trial.stats.as_dict()
        results[str(k)] = {name: fields[name] for name in ("draft_ms", "target_ms", "host_ms", "tau", "rounds")}
    return results


def _auto(setup: Setup) -> dict[str, Any]:
    """Return tokens/s of k auto, fixed draft lengths and plain decoding, by the share of tokens that is kept."""
    parts = setup.llm.parts
    auto = auto_planner(parts.target, parts.proposer)
    costs = auto.proposers[0].costs
    measured = {"target_ms": 1e3 * costs.target.base(1), "verify_ms": 1e3 * costs.target.base(5)}
    measured["draft_ms"] = 1e3 * costs.draft.base(1) if costs.draft else 0.0
    results: dict[str, Any] = {"costs": measured}
    for kept in _KEPT:
        planners: dict[str, Planner] = {"auto": auto_planner(parts.target, parts.proposer)}
        planners |= {str(k): FixedPlanner(k) for k in _FIXED}
        results[str(kept)] = {name: _run_corrupted(setup, planner, kept) for name, planner in planners.items()}
    return results


def _run_corrupted(setup: Setup, planner: Planner, kept: float) -> dict[str, float]:
    """Run the prompts one by one. Return tokens/s, draft tokens per round and the times of a round."""
    parts = setup.llm.parts
    proposer = CorruptedDraft(parts.proposer, kept=kept, vocab=parts.vocab)
    engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=planner)
    llm = LLM.from_parts(replace(parts, engine=engine, proposer=proposer))
    began = perf_counter()
    tokens = 0
    for job in setup.jobs:
        tokens += sum(len(done.token_ids) for done in llm.generate([list(job.prompt)], job.params))
    seconds = perf_counter() - began
    fields = engine.stats.as_dict()
    times = {name: fields[name] for name in ("draft_ms", "target_ms", "host_ms", "tau")}
    return {"tokens_per_s": tokens / seconds, "k": fields["draft_tokens"] / max(fields["rounds"], 1), **times}


def _kernels(setup: Setup) -> dict[str, Any]:
    """Return the kernels of a pass over one token, of target and draft, and the time in which none runs."""
    if setup.llm.parts.device.type != "cuda":
        return {"skipped": "there are kernels on a GPU only"}
    results = {}
    for name, model in zip(("target", "draft"), setup.models, strict=True):
        run = pass_over(model, setup.cached, 1)
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_time > 0)
        busy = sum(end - start for start, end in spans)
        results[name] = {
            "kernels": len(spans),
            "busy_us": busy,
            "idle_us": spans[-1][1] - spans[0][0] - busy if spans else 0.0,
        }
    return results


@torch.inference_mode()
def _rows(setup: Setup) -> dict[str, Any]:
    """Return, by number of rows, whether the first row of a product has the bits that it has alone."""
    parts = setup.llm.parts
    generator = torch.Generator(device=parts.device).manual_seed(0)
    hidden = 4096 if parts.device.type == "cuda" else 64
    weight = torch.randn(hidden, hidden, generator=generator, device=parts.device).to(parts.dtype)
    inputs = torch.randn(max(_ROWS), hidden, generator=generator, device=parts.device).to(parts.dtype)
    alone = inputs[:1] @ weight
    return {str(rows): bool(torch.equal((inputs[:rows] @ weight)[:1], alone)) for rows in _ROWS}


def _texts(setup: Setup) -> dict[str, Any]:
    """Return how many greedy texts differ from plain decoding, and the first positions that do."""
    texts = []
    for k in (0, setup.k):
        setup.planner.k = k
        prompts = [list(job.prompt) for job in setup.jobs]
        params = [job.params for job in setup.jobs]
        texts.append([completion.token_ids for completion in setup.llm.generate(prompts, params)])
    first = [
        next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), -1)
        for plain, other in zip(*texts, strict=True)
    ]
    return {"texts": len(first), "different": sum(at >= 0 for at in first), "first_positions": first}


def _memory(setup: Setup) -> dict[str, Any]:
    device = setup.llm.parts.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    graphs = [model.graphs for model in setup.models if getattr(model, "graphs", None)]
    return {
        "peak_bytes": peak,
        "graph_bytes": [each.bytes() for each in graphs],
        "recorded": [len(each.buckets()) for each in graphs],
        "recording_seconds": [each.seconds for each in graphs],
    }


CELLS = {  # in the order in which they run
    "bandwidth": Cell(seconds=15, run=_bandwidth),
    "split": Cell(seconds=40, run=_split),
    "auto": Cell(seconds=110, run=_auto),
    "step": Cell(seconds=60, run=MEASUREMENTS["step"]),
    "kernels": Cell(seconds=30, run=_kernels),
    "rows": Cell(seconds=20, run=_rows),
    "race": Cell(seconds=80, run=MEASUREMENTS["race"]),
    "texts": Cell(seconds=40, run=_texts),
    "memory": Cell(seconds=5, run=_memory),
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
) -> None:
    """Run the cells and write their results."""
    names = cells.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        raise typer.BadParameter(f"{unknown[0]} is unknown; use {', '.join(CELLS)}")
    began = perf_counter()
    results: dict[str, Any] = {}
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
        with_peers=False,
    )
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
