"""Run many streams against a server for minutes or hours, and check for errors, leaks and changed outputs.

python benchmarks/server/soak.py -- --proposer draft:@nano --max-num-seqs 64 --dtype float32
python benchmarks/server/soak.py --minutes 60 --target DIR -- --proposer draft:DIR2 --max-num-seqs 64 --dtype float32

The options after -- are those of `outrider serve`. The script makes a pool of requests: plain ones, stop strings,
reasoning, tools that may be called and that must be, in chats, responses, messages and completions, with random
lengths, temperatures and seeds. First each request is sent alone. Then many streams send them in random order, and
some clients leave midway. Each stream must have exactly one end, and as many tokens as its usage. Its events must add
up to those of the request alone: text, reasoning, calls, blocks, usage and finish reason. The memory of
the server must not grow after a warm-up. At the end no request may run, and no block of the KV cache may be in use. On
the native kernels the texts are equal in any precision. On torch, even in float32, rounding changes one now and then.
The last line is one JSON document. The exit status is 1 if a check has failed.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from aiohttp import ClientError
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from answers import Answer, Malformed, read_stream
from launch import Server, served
from soak_requests import PlannedRequest, plan, reasoning_model, stopped

from outrider.core.prompts import read_prompts
from outrider.lab.client.connection import Connection, open_connection
from outrider.lab.loadgen.figures import percentiles
from outrider.models.loader.embedded import model_folder
from outrider.runtime.machine import commit, hardware, versions

_TIMEOUT = 600.0  # seconds of a request
_MEMORY_INTERVAL = 2.0  # seconds between two measurements of the server's memory
_IDLE_GAUGES = (  # must be the same before and after the test
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_max_num_seqs",
    'outrider_kv_cache_blocks{state="used"}',
)
_WARMUP_SHARE = 0.3  # of the duration, during which memory may grow


class Expected(NamedTuple):
    """A request of the pool, and its answer when it was sent alone."""

    request: PlannedRequest
    answer: Answer


@dataclass(slots=True)
class SoakResult:
    """The results so far."""

    answers: int = 0
    canceled: int = 0
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # answers by API and kind of the request, and by their end
    errors: list[str] = field(default_factory=list)
    different: list[int] = field(default_factory=list)  # numbers of the requests with another answer than alone
    gaps: list[float] = field(default_factory=list)  # seconds between two parts of a stream
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, kilobytes

    def add(self, answer: Answer, number: int, expected: Expected, *, cut: bool) -> None:
        """Count an answer."""
        self.answers += not cut
        self.canceled += cut
        if not (answer.begins(expected.answer) if cut else answer == expected.answer):
            self.different.append(number)
        if not cut:
            self.tokens += answer.find("completion_tokens", "output_tokens")
            request = expected.request
            end = answer.find("finish_reason") or answer.find("stop_reason", "status")
            self.kinds.update([request.path, request.kind, end])

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
    target: Annotated[str, typer.Option(help="A folder, or the name of an embedded model.")] = "@mini",
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
    requests = plan(read_prompts(prompts), count=pool, max_tokens=max_tokens, seed=seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = reasoning_model(model_folder(target), Path(temporary) / "model")
        with served(["--target", str(folder), *(options or ())]) as server:
            run = asyncio.run(_soak(requests, server, seconds=seconds, streams=streams, cancel=cancel, seed=seed))
    result = run.result
    failures = {
        "requests failed": len(result.errors),
        "answers differ from those alone": len(result.different),
        "memory grew too much": int(result.growth(seconds) > growth),
    }
    for name, before in run.before.items():
        if run.after[name] != before:
            failures[f"{name} was {before:g} and is {run.after[name]:g}"] = 1
    _show(result, failures, seconds)
    document = {
        "benchmark": "serving soak",
        "server": list(options or ()),
        "arguments": {
            "target": target,
            "minutes": minutes,
            "streams": streams,
            "pool": pool,
            "cancel": cancel,
            "max_tokens": max_tokens,
        },
        "seed": seed,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
        "answers": result.answers,
        "canceled": result.canceled,
        "tokens": result.tokens,
        "kinds": result.kinds,
        "alone": run.num_alone,
        "errors": result.errors[:20],
        "different": sorted(set(result.different)),
        "between_parts_ms": percentiles(result.gaps),
        "memory_growth": round(result.growth(seconds), 4),
        "memory_kb": [size for _, size in result.memory],
        "idle_metrics": run.after,
        "passed": not any(failures.values()),
    }
    print(json.dumps(document))
    if any(failures.values()):
        raise typer.Exit(1)


async def _soak(
    requests: list[PlannedRequest], server: Server, *, seconds: float, streams: int, cancel: float, seed: int
) -> SoakRun:
    async with open_connection({}, _TIMEOUT) as http:
        pool = [await _alone(http, server, request) for request in requests]
        before = _idle_gauges(server)
        soak = SoakResult()
        generator = random.Random(seed)
        began = time.monotonic()

        async def stream() -> None:
            while time.monotonic() - began < seconds:
                number = generator.randrange(len(pool))
                most = generator.randint(1, 8) if generator.random() < cancel else None
                try:
                    answer, cut = await _send(http, server, pool[number].request, soak.gaps, most)
                    soak.add(answer, number, pool[number], cut=cut)
                except (ClientError, TimeoutError, ValueError) as error:
                    soak.errors.append(f"request {number}: {type(error).__name__}: {error}")

        memory_task = asyncio.create_task(_record_memory(server, soak, began))
        await asyncio.gather(*(stream() for _ in range(streams)))
        memory_task.cancel()
    return SoakRun(result=soak, before=before, after=_idle_gauges(server), num_alone=len(pool))


async def _alone(http: Connection, server: Server, request: PlannedRequest) -> Expected:
    """Send a request alone. One that stops gets a stop string from the middle of its own text."""
    answer, _ = await _send(http, server, request, [])
    text = answer.find("content", "text")
    if not request.stops or not text:
        return Expected(request, answer)
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    request = stopped(request, stop)
    answer, _ = await _send(http, server, request, [])
    if (answer.find("content", "text") or "") != text.partition(stop)[0]:
        raise Malformed(f"the text does not end before the stop string {stop!r}: {answer}")
    return Expected(request, answer)


async def _send(
    http: Connection, server: Server, request: PlannedRequest, gaps: list[float], most: int | None = None
) -> tuple[Answer, bool]:
    """Send a request, and read its stream or `most` parts of it. Return what they add up to, and whether it was cut."""
    options: dict[str, Any] = {"stream": True}
    if request.path.endswith("completions"):
        options["stream_options"] = {"include_usage": True}
    raw = b""
    times = []
    async with http.request("POST", f"{server.url}/{request.path}", request.body | options) as response:
        if not response.ok:
            raise Malformed(f"{response.status}: {await response.text()}")
        async for part in response.content.iter_any():
            raw += part
            times.append(time.monotonic())
            if len(times) == most:
                break
    gaps += [after - before for before, after in pairwise(times)]
    cut = len(times) == most
    return read_stream(raw, cut=cut), cut


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
    for name in ("answers", "canceled", "tokens/s", "between parts ms p50 p99", "MiB at first", "at last", "growth"):
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
