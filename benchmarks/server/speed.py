"""Tokens a second of a server with its own planner against the same server without guesses, and the bare engine.

python benchmarks/server/speed.py -- --max-num-seqs 64
python benchmarks/server/speed.py --prompts FILE --rounds 7 -- --target DIR --proposer draft:DIR2 --max-num-seqs 64
python benchmarks/server/speed.py --beside other=http://127.0.0.1:8001/v1 -- --target DIR     # one that runs already

What stands behind -- goes to `outrider serve`. In each round and at each concurrency the ways take turns, in an order
that alternates: `auto`, `plain` (the same requests with k = 0, to the same server), at one request at a time the same
two of the server's engine alone, in the same process, and other servers of OpenAI's interface, which must be idle when
it is not their turn. Prompts are shuffled, and each way gets the same ones in the same order, under a name of its own,
so that none finds in our cache what another read; others had better be started without sharing prefixes. The last line
is one JSON document.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from launch import Server, served

from outrider.loadgen.client import put_load
from outrider.loadgen.command import points
from outrider.loadgen.settings import Settings
from outrider.loadgen.workload import plan_requests
from outrider.measure.prompts import Prompt, read_prompts
from outrider.system.machine import commit, hardware, versions

AUTO, PLAIN, BARE, BARE_PLAIN = "auto", "plain", "bare", "bare plain"
_ENGINE = {AUTO: BARE, PLAIN: BARE_PLAIN}  # what of the bare engine a way stands beside


@dataclass(slots=True)
class Record:
    """What one way did at one concurrency, round by round."""

    rates: list[float] = field(default_factory=list)  # tokens a second
    gaps: list[float] = field(default_factory=list)  # seconds between tokens
    firsts: list[float] = field(default_factory=list)  # seconds to the first


def main(
    options: Annotated[list[str] | None, typer.Argument(help="For `outrider serve`, behind --.")] = None,
    *,
    beside: Annotated[list[str] | None, typer.Option(metavar="NAME=URL", help="Another server; repeatable.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    concurrency: str = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    requests: Annotated[
        int, typer.Option(min=1, help="In a turn at least; twice the concurrency if that is more.")
    ] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: int = 0,
) -> None:
    """Measure, and print what came out."""
    asked, levels = list(options or ()), [int(level) for level in concurrency.split(",")]
    texts = read_prompts(prompts)
    records: dict[tuple[int, str], Record] = {}
    others = {name: url for name, _, url in (each.partition("=") for each in beside or ())}
    with ExitStack() as open:
        server = open.enter_context(served(asked, bare=1 in levels))
        own = server.url
        load = Settings(base_url=own, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        for turn, level in product(range(-1, rounds), levels):  # the first round is for warming up
            ways = [AUTO, PLAIN, *others, *(_ENGINE.values() if level == 1 else ())]
            shuffled = _shuffled(texts, f"{seed}/{turn}/{level}")
            for way in ways if turn % 2 else reversed(ways):
                turns = replace(
                    load,
                    base_url=others.get(way, own),
                    max_concurrency=level,
                    num_requests=max(requests, 2 * level),
                    k=0 if way in (PLAIN, BARE_PLAIN) else None,
                    user=f"{way} {turn} {level}",
                )
                record = Record() if turn < 0 else records.setdefault((level, way), Record())
                _measure(turns, shuffled, record, server if way in _ENGINE.values() else None)
    _show(records)
    print(
        json.dumps(
            _document(records, asked, others) | {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        )
    )


def _measure(load: Settings, texts: Sequence[Prompt], record: Record, bare: Server | None) -> None:
    if bare:
        tokens, seconds = bare.bare([want.body for want in plan_requests(load, texts, "")])
        record.rates.append(tokens / seconds)
        return
    asked, seconds = asyncio.run(put_load(load, texts))
    if wrong := [each.error for each in asked if each.error]:
        raise RuntimeError(f"{len(wrong)} requests went wrong, the first: {wrong[0]}")
    record.rates.append(sum(each.tokens for each in asked) / seconds)
    record.gaps += [gap for each in asked for gap in each.inter_token_latencies]
    record.firsts += [each.ttft for each in asked]


def _shuffled(texts: Sequence[Prompt], seed: str) -> list[Prompt]:
    return random.Random(seed).sample(texts, len(texts))


def _ratio(records: dict[tuple[int, str], Record], level: int, one: str, other: str) -> list[float]:
    """Round by round, where both were measured."""
    if one == other or (level, other) not in records:
        return []
    return [a / b for a, b in zip(records[level, one].rates, records[level, other].rates, strict=True)]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _show(records: dict[tuple[int, str], Record]) -> None:
    table = Table(title="tokens/s: median over rounds (range)")
    for name in (
        "at once",
        "way",
        "tokens/s",
        "against plain",
        "of the bare engine",
        "first ms p50",
        "between ms p50 p99",
    ):
        table.add_column(name, justify="left" if name == "way" else "right")
    for (level, way), record in records.items():
        against = _ratio(records, level, way, PLAIN)
        engine = _ratio(records, level, way, _ENGINE.get(way, way))
        gaps, firsts = points(record.gaps), points(record.firsts)
        table.add_row(
            str(level),
            way,
            _spread(record.rates, ".0f"),
            _spread(against, ".2f"),
            _spread(engine, ".3f"),
            f"{firsts['p50']:.1f}" if firsts else "",
            f"{gaps['p50']:.1f} {gaps['p99']:.1f}" if gaps else "",
        )
    Console(width=140).print(table)


def _document(records: dict[tuple[int, str], Record], options: Sequence[str], others: dict[str, str]) -> dict[str, Any]:
    return {
        "benchmark": "serving speed",
        "server": list(options),
        "beside": others,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
        "results": [
            {
                "concurrency": level,
                "way": way,
                "tokens_per_s": record.rates,
                "against_plain": _ratio(records, level, way, PLAIN),
                "of_bare_engine": _ratio(records, level, way, _ENGINE.get(way, way)),
                "first_ms": points(record.firsts),
                "between_tokens_ms": points(record.gaps),
            }
            for (level, way), record in records.items()
        ],
    }


if __name__ == "__main__":
    typer.run(main)
