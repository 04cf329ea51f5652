"""Measure the tokens/s of a server with its planner against plain decoding, the bare engine, and other servers.

python benchmarks/server/speed.py -- --max-num-seqs 64
python benchmarks/server/speed.py --prompts FILE --rounds 7 -- --target DIR --proposer draft:DIR2 --max-num-seqs 64
python benchmarks/server/speed.py --beside other=http://127.0.0.1:8001/v1 -- --target DIR     # a running server

The options after -- are those of `outrider serve`. In each round and at each concurrency the variants take turns, in
alternating order:

- `auto`: the server with its planner.
- `plain`: the same requests with k = 0, to the same server.
- `bare` and `bare plain`, at concurrency 1: the same with the engine of the server only, in the same process.
- Other servers of the OpenAI API. They must be idle when it is not their turn.

Prompts are shuffled. Each variant gets the same prompts in the same order. Each has its own user name, so that none
finds in our prefix cache what another one has put there. Start other servers without prefix caching. The last line is
one JSON document.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
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

from outrider.core.prompts import Prompt, read_prompts
from outrider.lab.loadgen.client import run_load
from outrider.lab.loadgen.figures import percentiles
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import plan_requests
from outrider.runtime.machine import commit, hardware, versions

AUTO, PLAIN, BARE, BARE_PLAIN = "auto", "plain", "bare", "bare plain"
_BARE_VARIANTS = {AUTO: BARE, PLAIN: BARE_PLAIN}  # the engine variant to which a server variant is compared


@dataclass(slots=True)
class Record:
    """The measurements of one variant at one concurrency."""

    rates: list[float] = field(default_factory=list)  # tokens/s, by round
    gaps: list[float] = field(default_factory=list)  # seconds between tokens
    ttfts: list[float] = field(default_factory=list)  # seconds to the first token


Records = dict[tuple[int, str], Record]  # by concurrency and variant


def main(
    options: Annotated[list[str] | None, typer.Argument(help="Options of `outrider serve`, after --.")] = None,
    *,
    beside: Annotated[list[str] | None, typer.Option(metavar="NAME=URL", help="Another server; repeatable.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: an embedded set.")] = None,
    concurrency: str = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    requests: Annotated[
        int, typer.Option(min=1, help="Minimum per turn; at least twice the concurrency are sent.")
    ] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: int = 0,
) -> None:
    """Run the measurement and print its results."""
    serve_options = list(options or ())
    levels = [int(level) for level in concurrency.split(",")]
    prompt_set = read_prompts(prompts)
    records: Records = {}
    others = {}
    for text in beside or ():
        name, _, url = text.partition("=")
        others[name] = url
    with served(serve_options, bare=1 in levels) as server:
        load = Settings(base_url=server.url, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        for round, level in product(range(-1, rounds), levels):  # round -1 warms up
            variants = [AUTO, PLAIN, *others, *(_BARE_VARIANTS.values() if level == 1 else ())]
            shuffled = _shuffled(prompt_set, f"{seed}/{round}/{level}")
            for variant in variants if round % 2 else reversed(variants):
                turn = replace(
                    load,
                    base_url=others.get(variant, server.url),
                    max_concurrency=level,
                    num_requests=max(requests, 2 * level),
                    k=0 if variant in (PLAIN, BARE_PLAIN) else None,
                    user=f"{variant} {round} {level}",
                )
                record = Record() if round < 0 else records.setdefault((level, variant), Record())
                _measure(turn, shuffled, record, server if variant in _BARE_VARIANTS.values() else None)
    _show(records)
    arguments = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    print(json.dumps(_document(records, serve_options, others) | arguments))


def _measure(load: Settings, prompts: Sequence[Prompt], record: Record, bare: Server | None) -> None:
    """Send the requests of one turn and add the results to `record`. `bare` is the server whose engine runs them."""
    if bare:
        tokens, seconds = bare.bare([request.body for request in plan_requests(load, prompts, "")])
        record.rates.append(tokens / seconds)
        return
    results, seconds = asyncio.run(run_load(load, prompts))
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
    record.rates.append(sum(result.tokens for result in results) / seconds)
    record.gaps += [gap for result in results for gap in result.inter_token_latencies]
    record.ttfts += [result.ttft for result in results]


def _shuffled(prompts: Sequence[Prompt], seed: str) -> list[Prompt]:
    return random.Random(seed).sample(prompts, len(prompts))


def _ratios(records: Records, level: int, variant: str, base: str) -> list[float]:
    """Return the speed of a variant over that of another one in each round, or [] if only one was measured."""
    if variant == base or (level, base) not in records:
        return []
    return [rate / other for rate, other in zip(records[level, variant].rates, records[level, base].rates, strict=True)]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _show(records: Records) -> None:
    table = Table(title="tokens/s: median over rounds (range)")
    for name in (
        "concurrency",
        "variant",
        "tokens/s",
        "over plain",
        "over bare engine",
        "ttft ms p50",
        "between tokens ms p50 p99",
    ):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for (level, variant), record in records.items():
        over_plain = _ratios(records, level, variant, PLAIN)
        over_bare = _ratios(records, level, variant, _BARE_VARIANTS.get(variant, variant))
        gaps = percentiles(record.gaps)
        ttfts = percentiles(record.ttfts)
        table.add_row(
            str(level),
            variant,
            _spread(record.rates, ".0f"),
            _spread(over_plain, ".2f"),
            _spread(over_bare, ".3f"),
            f"{ttfts['p50']:.1f}" if ttfts else "",
            f"{gaps['p50']:.1f} {gaps['p99']:.1f}" if gaps else "",
        )
    Console(width=140).print(table)


def _document(records: Records, options: Sequence[str], others: dict[str, str]) -> dict[str, Any]:
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
                "variant": variant,
                "tokens_per_s": record.rates,
                "against_plain": _ratios(records, level, variant, PLAIN),
                "of_bare_engine": _ratios(records, level, variant, _BARE_VARIANTS.get(variant, variant)),
                "first_ms": percentiles(record.ttfts),
                "between_tokens_ms": percentiles(record.gaps),
            }
            for (level, variant), record in records.items()
        ],
    }


if __name__ == "__main__":
    typer.run(main)
