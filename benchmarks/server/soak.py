"""Run many streams against a server for minutes or hours, and check for errors, leaks and changed outputs.

python benchmarks/server/soak.py -- --max-num-seqs 64 --dtype float32
python benchmarks/server/soak.py --minutes 60 -- --target DIR --proposer draft:DIR2 --max-num-seqs 64 --dtype float32

The options after -- are those of `outrider serve`. The script generates a pool of requests with mixed lengths,
temperatures, penalties and seeds. First each request is sent alone. Then many streams send them in random order, and
some are canceled midway. Each text must equal that of the request alone, or be a prefix of it. The memory of the
server must not grow after a warm-up. At the end no request may run, and no block of the KV cache may be in use. On the
native kernels the texts are equal in any precision. On torch, even in float32, rounding changes one now and then. The
last line is one JSON document. The exit status is 1 if a check has failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from launch import Server, served

from outrider.core.prompts import read_prompts
from outrider.lab.loadgen.client import connect
from outrider.lab.loadgen.figures import percentiles
from outrider.lab.loadgen.response import RequestResult
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import PlannedRequest, plan_requests
from outrider.runtime.machine import commit, hardware, versions

_MEMORY_INTERVAL = 2.0  # seconds between two measurements of the server's memory
_IDLE_GAUGES = (  # must be the same before and after the test
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_max_num_seqs",
    'outrider_kv_cache_blocks{state="used"}',
)
_WARMUP_SHARE = 0.3  # of the duration, during which memory may grow


@dataclass(slots=True)
class SoakResult:
    """The results so far."""

    answers: int = 0
    canceled: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[int] = field(default_factory=list)  # numbers of the requests with another text than alone
    gaps: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, kilobytes

    def add(self, result: RequestResult, text_alone: str) -> None:
        """Count the result of a request. `text_alone` is its text when it was sent alone."""
        self.answers += result.completed
        self.canceled += result.canceled
        self.tokens += result.tokens
        if result.error:
            self.errors.append(result.error)
        if result.completed:
            self.gaps += result.inter_token_latencies
            is_same = result.text == text_alone
        else:
            is_same = text_alone.startswith(result.text)
        if not is_same:
            self.different.append(result.number)

    def growth(self, seconds: float) -> float:
        """Return the relative growth of memory: the maximum of the last third over that near the end of the warm-up."""
        warmup_end = _WARMUP_SHARE * seconds
        early = [size for at, size in self.memory if _WARMUP_SHARE / 2 * seconds <= at < warmup_end]
        late = [size for at, size in self.memory if at >= 2 / 3 * seconds]
        return max(late) / max(early) - 1 if early and late else 0.0


class SoakRun(NamedTuple):
    """The results of a test, and the gauges of the idle server before and after it."""

    result: SoakResult
    before: dict[str, float]
    after: dict[str, float]
    num_alone: int  # requests that were sent alone


def main(
    options: Annotated[list[str] | None, typer.Argument(help="Options of `outrider serve`, after --.")] = None,
    *,
    minutes: Annotated[float, typer.Option(min=0.05)] = 10.0,
    streams: Annotated[int, typer.Option(min=1)] = 64,
    pool: Annotated[int, typer.Option(min=1, help="Number of different requests.")] = 192,
    cancel: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that are canceled.")] = 0.15,
    max_tokens: Annotated[int, typer.Option(min=8)] = 256,
    growth: Annotated[float, typer.Option(min=0.0, help="Maximum growth of memory.")] = 0.05,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    seed: int = 0,
) -> None:
    """Run the test and print its results."""
    seconds = 60 * minutes
    with served(list(options or ())) as server:
        load = Settings(
            base_url=server.url,
            prompts=prompts,
            num_requests=pool,
            mixed=True,
            max_tokens=max_tokens,
            cancel=cancel,
            seed=seed,
        )
        run = asyncio.run(_soak(load, server, seconds=seconds, streams=streams))
    result = run.result
    failures = {
        "requests failed": len(result.errors),
        "texts differ from those alone": len(result.different),
        "memory grew too much": int(result.growth(seconds) > growth),
    }
    for name, before in run.before.items():
        if run.after[name] != before:
            failures[f"{name} was {before:g} and is {run.after[name]:g}"] = 1
    _show(result, failures, seconds)
    document = {
        "benchmark": "serving soak",
        "server": list(options or ()),
        "arguments": {"minutes": minutes, "streams": streams, "pool": pool, "cancel": cancel, "max_tokens": max_tokens},
        "seed": seed,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
        "answers": result.answers,
        "canceled": result.canceled,
        "tokens": result.tokens,
        "alone": run.num_alone,
        "errors": result.errors[:20],
        "different": sorted(set(result.different)),
        "between_tokens_ms": percentiles(result.gaps),
        "memory_growth": round(result.growth(seconds), 4),
        "memory_kb": [size for _, size in result.memory],
        "idle_metrics": run.after,
        "passed": not any(failures.values()),
    }
    print(json.dumps(document))
    if any(failures.values()):
        raise typer.Exit(1)


async def _soak(load: Settings, server: Server, *, seconds: float, streams: int) -> SoakRun:
    async with connect(load) as (client, model):
        requests = plan_requests(load, read_prompts(load.prompts), model)
        uncanceled = [PlannedRequest(path=request.path, body=request.body) for request in requests]
        results_alone = [await client.send(request, i) for i, request in enumerate(uncanceled)]
        if errors := [result.error for result in results_alone if result.error]:
            raise RuntimeError(f"{len(errors)} requests failed alone, the first: {errors[0]}")
        texts = [result.text for result in results_alone]
        before = _idle_gauges(server)
        soak = SoakResult()
        generator = random.Random(load.seed)
        began = time.monotonic()

        async def stream() -> None:
            while time.monotonic() - began < seconds:
                number = generator.randrange(len(requests))
                soak.add(await client.send(requests[number], number), texts[number])

        memory_task = asyncio.create_task(_record_memory(server, soak, began))
        await asyncio.gather(*(stream() for _ in range(streams)))
        memory_task.cancel()
    return SoakRun(result=soak, before=before, after=_idle_gauges(server), num_alone=len(texts))


async def _record_memory(server: Server, soak: SoakResult, began: float) -> None:
    while True:
        soak.memory.append((time.monotonic() - began, server.kilobytes()))
        await asyncio.sleep(_MEMORY_INTERVAL)


def _idle_gauges(server: Server) -> dict[str, float]:
    """Return requests, slots, and used blocks of the KV cache when the server is idle."""
    gauges = server.rest()
    return {name: gauges[name] for name in _IDLE_GAUGES}


def _show(result: SoakResult, failures: dict[str, int], seconds: float) -> None:
    table = Table(title=f"{seconds / 60:g} minutes")
    for name in ("answers", "canceled", "tokens/s", "between tokens ms p50 p99", "MiB at first", "at last", "growth"):
        table.add_column(name, justify="right")
    gaps = percentiles(result.gaps)
    sizes = [size for _, size in result.memory]
    table.add_row(
        str(result.answers),
        str(result.canceled),
        f"{result.tokens / seconds:.0f}",
        f"{gaps['p50']:.1f} {gaps['p99']:.1f}" if gaps else "",
        f"{sizes[0] / 1024:.0f}",
        f"{sizes[-1] / 1024:.0f}",
        f"{result.growth(seconds):+.1%}",
    )
    console = Console(width=120)
    console.print(table)
    for description, count in failures.items():
        if count:
            console.print(f"failed: {description} ({count})", style="red")


if __name__ == "__main__":
    typer.run(main)
