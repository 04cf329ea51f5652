"""Many streams for minutes on end: no error, no leak, and every text as it is alone.

python benchmarks/server/soak.py -- --max-num-seqs 64 --dtype float32
python benchmarks/server/soak.py --minutes 60 -- --target DIR --proposer draft:DIR2 --max-num-seqs 64 --dtype float32

What stands behind -- goes to `outrider serve`. A number of requests is drawn, of mixed lengths, temperatures, penalties
and seeds. Each is first answered alone. Then many streams ask them in random order, some of which hang up midway, and
each text must be the one from before, or begin it. Meanwhile the server's memory is watched: after a warm-up it may not
grow. In the end nothing may run and no block of the cache may be held. Texts are the same on the native kernels in
any precision; on torch's, even in float32, rounding parts one now and then. The last line is one JSON document; the
exit status is 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from launch import Server, served

from outrider.loadgen.client import connected
from outrider.loadgen.command import points
from outrider.loadgen.response import RequestResult
from outrider.loadgen.settings import Settings
from outrider.loadgen.workload import PlannedRequest, plan_requests
from outrider.measure.prompts import read_prompts
from outrider.system.machine import commit, hardware, versions

_LOOK = 2.0  # seconds between two looks at the server's memory
_HELD = (
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_max_num_seqs",
    'outrider_kv_cache_blocks{state="held"}',
)
_WARM = 0.3  # of the time, after which memory may not grow


@dataclass(slots=True)
class Soak:
    """What came of it."""

    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[int] = field(default_factory=list)  # numbers of requests whose text was another
    gaps: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, kilobytes

    def note(self, asked: RequestResult, alone: str) -> None:
        self.answers += asked.done
        self.cancelled += asked.cancelled
        self.tokens += asked.tokens
        self.errors += [asked.error] if asked.error else []
        self.gaps += asked.inter_token_latencies if asked.done else []
        if asked.text != alone if asked.done else not alone.startswith(asked.text):
            self.different.append(asked.number)

    def growth(self, seconds: float) -> float:
        """Of memory: the most of the last third against the most around the end of the warm-up."""
        early = [size for at, size in self.memory if _WARM / 2 * seconds <= at < _WARM * seconds]
        late = [size for at, size in self.memory if at >= 2 / 3 * seconds]
        return max(late) / max(early) - 1 if early and late else 0.0


def main(
    options: Annotated[list[str] | None, typer.Argument(help="For `outrider serve`, behind --.")] = None,
    *,
    minutes: Annotated[float, typer.Option(min=0.05)] = 10.0,
    streams: Annotated[int, typer.Option(min=1)] = 64,
    pool: Annotated[int, typer.Option(min=1, help="Different requests.")] = 192,
    cancel: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share that hangs up midway.")] = 0.15,
    max_tokens: Annotated[int, typer.Option(min=8)] = 256,
    growth: Annotated[float, typer.Option(min=0.0, help="Of memory, at most.")] = 0.05,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    seed: int = 0,
) -> None:
    """Soak, and say what came of it."""
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
        soak, before, after, alone = asyncio.run(_soak(load, server, seconds=60 * minutes, streams=streams))
    failures = {
        "requests went wrong": len(soak.errors),
        "texts were not the same as alone": len(soak.different),
        "memory grew too much": int(soak.growth(60 * minutes) > growth),
        **{f"{name} was {before[name]:g} and is {after[name]:g}": 1 for name in before if before[name] != after[name]},
    }
    _show(soak, failures, 60 * minutes)
    document = {
        "benchmark": "serving soak",
        "server": list(options or ()),
        "arguments": {"minutes": minutes, "streams": streams, "pool": pool, "cancel": cancel, "max_tokens": max_tokens},
        "seed": seed,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
        "answers": soak.answers,
        "cancelled": soak.cancelled,
        "tokens": soak.tokens,
        "alone": alone,
        "errors": soak.errors[:20],
        "different": sorted(set(soak.different)),
        "between_tokens_ms": points(soak.gaps),
        "memory_growth": round(soak.growth(60 * minutes), 4),
        "memory_kb": [size for _, size in soak.memory],
        "at_rest": after,
        "passed": not any(failures.values()),
    }
    print(json.dumps(document))
    if any(failures.values()):
        raise typer.Exit(1)


async def _soak(
    load: Settings, server: Server, *, seconds: float, streams: int
) -> tuple[Soak, dict[str, float], dict[str, float], int]:
    """What came of it, what the server held before and after, and how many were answered alone."""
    async with connected(load) as (client, model):
        wants = plan_requests(load, read_prompts(load.prompts), model)
        patient = [PlannedRequest(path=want.path, body=want.body) for want in wants]
        first = [await client.ask(want, i) for i, want in enumerate(patient)]
        if wrong := [each.error for each in first if each.error]:
            raise RuntimeError(f"{len(wrong)} requests went wrong alone, the first: {wrong[0]}")
        texts = [each.text for each in first]
        before, soak, chance = _held(server), Soak(), random.Random(load.seed)
        began = time.monotonic()

        async def one_by_one() -> None:
            while time.monotonic() - began < seconds:
                number = chance.randrange(len(wants))
                soak.note(await client.ask(wants[number], number), texts[number])

        watch = asyncio.create_task(_watch(server, soak, began))
        await asyncio.gather(*(one_by_one() for _ in range(streams)))
        watch.cancel()
    return soak, before, _held(server), len(texts)


async def _watch(server: Server, soak: Soak, began: float) -> None:
    while True:
        soak.memory.append((time.monotonic() - began, server.kilobytes()))
        await asyncio.sleep(_LOOK)


def _held(server: Server) -> dict[str, float]:
    """What is held at rest: requests, slots, and blocks of the cache by those who run."""
    gauges = server.rest()
    return {name: gauges[name] for name in _HELD}


def _show(soak: Soak, failures: dict[str, int], seconds: float) -> None:
    table = Table(title=f"{seconds / 60:g} minutes")
    for name in ("answers", "hung up", "tokens/s", "between tokens ms p50 p99", "MiB at first", "at last", "growth"):
        table.add_column(name, justify="right")
    gaps, sizes = points(soak.gaps), [size for _, size in soak.memory]
    table.add_row(
        str(soak.answers),
        str(soak.cancelled),
        f"{soak.tokens / seconds:.0f}",
        f"{gaps['p50']:.1f} {gaps['p99']:.1f}" if gaps else "",
        f"{sizes[0] / 1024:.0f}",
        f"{sizes[-1] / 1024:.0f}",
        f"{soak.growth(seconds):+.1%}",
    )
    console = Console(width=120)
    console.print(table)
    for what, count in failures.items():
        if count:
            console.print(f"failed: {what} ({count})", style="red")


if __name__ == "__main__":
    typer.run(main)
