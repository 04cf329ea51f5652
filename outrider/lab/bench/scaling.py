"""Measures how the time of a pass falls with the number of CPU threads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from outrider.drafting.plan.known_costs import known_costs
from outrider.lab.bench.rates import measure_rates
from outrider.lab.bench.run import load
from outrider.lab.bench.settings import Settings
from outrider.runtime import machine
from outrider.runtime.progress import stage
from outrider.runtime.report.console import new_table

_TOKENS = (1, 8, 64)  # of the passes


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamTimes:
    """The passes of one number of threads."""

    threads: int
    pass_seconds: dict[int, float]  # by the tokens of a pass, with an empty cache
    read_bytes_per_s: float  # what the threads read from memory at most
    weight_bytes: int

    @property
    def share_of_bandwidth(self) -> float:
        """The share of the bandwidth for reading that a pass of one token reaches."""
        return self.weight_bytes / self.pass_seconds[1] / self.read_bytes_per_s


def run_scaling(settings: Settings) -> dict[str, Any]:
    """Measure passes of the target with each number of threads, and return a JSON document."""
    teams = []
    for threads in settings.scaling:
        engine = replace(settings.engine, threads=threads, proposer="none", device="cpu", plan=None)
        with stage(f"measuring with {threads} threads"):
            parts = load(replace(settings, engine=engine)).parts
            (costs,) = known_costs(parts.target, [None], whole=True)
            rates = measure_rates(parts.device, parts.dtype)
        teams.append(
            TeamTimes(
                threads=threads,
                pass_seconds={tokens: costs.target(tokens, seqs=1, cached=0) for tokens in _TOKENS},
                read_bytes_per_s=max(rates.read.values()),
                weight_bytes=parts.target.bytes(),
            )
        )
    return {
        "benchmark": "outrider bench --scaling",
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "teams": [asdict(team) | {"share_of_bandwidth": team.share_of_bandwidth} for team in teams],
    }


def show_scaling(document: dict[str, Any], console: Console) -> None:
    """Print the time of passes and their speedup over the first number of threads."""
    teams: Sequence[dict[str, Any]] = document["teams"]
    table = new_table("Time of a pass in ms, and its speedup over the first row")
    table.add_column("threads", justify="right")
    for tokens in _TOKENS:
        table.add_column(f"{tokens} tokens" if tokens > 1 else "1 token", justify="right")
        table.add_column("speedup", justify="right")
    for name in ("read, GB/s", "% of it at 1 token"):
        table.add_column(name, justify="right")
    for team in teams:
        cells = [str(team["threads"])]
        for tokens in _TOKENS:
            seconds = team["pass_seconds"][tokens]
            cells += [f"{1e3 * seconds:.2f}", f"{teams[0]['pass_seconds'][tokens] / seconds:.2f}"]
        cells += [f"{team['read_bytes_per_s'] / 1e9:.1f}", f"{100 * team['share_of_bandwidth']:.0f}"]
        table.add_row(*cells)
    console.print(table)
