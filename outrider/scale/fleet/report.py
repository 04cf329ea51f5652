"""The results of a simulation: throughput, latencies, and the use of the replicas."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console

from outrider.runtime.report.console import new_table
from outrider.scale.fleet.simulation import Result

NOTE = "a simulation with a cost model; no server ran"


def summarize(result: Result) -> dict[str, Any]:
    """Return the figures of a simulation."""
    counts = result.counts
    total = {name: sum(map(attrgetter(name), counts)) for name in ("passes", "tokens", "drafted")}
    prompts = sum(job.arrival.prompt for job in result.jobs)
    busy = [each.busy_seconds / result.seconds for each in counts] if result.seconds else [0.0]
    firsts = [job.first_token - job.arrived for job in result.jobs if job.first_token is not None]
    ends = [job.finished - job.arrived for job in result.jobs if job.finished is not None]
    gaps = [
        (job.finished - job.first_token) / (job.emitted - 1)
        for job in result.jobs
        if job.finished is not None and job.first_token is not None and job.emitted > 1
    ]
    return {
        "requests": len(result.jobs),
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "ttft_seconds": percentiles(firsts),
        "tpot_seconds": percentiles(gaps),
        "e2e_seconds": percentiles(ends),
        "tau": total["tokens"] / total["passes"] if total["passes"] else 0.0,
        "k": total["drafted"] / total["passes"] if total["passes"] else 0.0,
        "prefix_hits": sum(each.hit_tokens for each in counts) / prompts if prompts else 0.0,
        "busy": {"mean": sum(busy) / len(busy), "min": min(busy), "max": max(busy)},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentile (nearest rank); {} without values."""
    ordered = sorted(values)
    return {f"p{share}": ordered[max(-(-len(ordered) * share // 100) - 1, 0)] for share in (50, 95, 99) if ordered}


def show(document: dict[str, Any], console: Console) -> None:
    """Print the figures of each simulated fleet as a table."""
    console.print(f"[bold]Simulation[/bold]: {document['description']}", highlight=False)
    table = new_table(
        "Tokens/s of the fleet; ttft: seconds to the first token; tpot: ms between tokens; hits:"
        " prompt tokens from the cache; busy: share of the time that replicas compute"
    )
    table.add_column("routing", no_wrap=True)
    table.add_column("speculation", no_wrap=True)
    for name in ("replicas", "requests", "tokens/s", "ttft p50 p99", "tpot ms p50 p99", "k", "tau", "hits", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in document["results"]:
        ttft, tpot = run["ttft_seconds"], run["tpot_seconds"]
        table.add_row(
            run["routing"],
            run["speculation"],
            str(run["replicas"]),
            str(run["requests"]),
            f"{run['tokens_per_s']:.0f}",
            f"{ttft['p50']:.3f} {ttft['p99']:.3f}",
            f"{1e3 * tpot['p50']:.1f} {1e3 * tpot['p99']:.1f}" if tpot else "",
            f"{run['k']:.2f}",
            f"{run['tau']:.2f}",
            f"{run['prefix_hits']:.0%}",
            f"{run['busy']['mean']:.0%}",
        )
    console.print(table)
    console.print(f"This is {document['simulation']}.", highlight=False)
