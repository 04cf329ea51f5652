"""Compare a simulated server with the real one at several loads, and write the costs for `outrider fleet`.

python benchmarks/server/fleet.py --out costs.json
python benchmarks/server/fleet.py --target DIR --draft DIR2 --k 4 --rounds 5

1. Passes of target and draft are measured on this machine (`outrider.drafting.plan.calibrate`), in CPU time.
2. `outrider serve` runs on one thread. At 2, 8 and 32 streams its work outside of passes is measured: seconds per
   round, round with draft tokens, sequence of a round, chunk of a stream, and request. The acceptance by position comes
   from these runs, too.
3. At 1, 4, 16 and 64 streams, which are not used in step 2, the server and the simulation are compared.

The server is measured by wall time and by the CPU time of its process. On a busy machine the wall time says more about
the other programs. The CPU time says what the server would do on a core of its own, and this is what is simulated.
Variants take turns; figures are medians over the rounds. The last line is one JSON document.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from launch import Server, served

import outrider.drafting.plan.calibrate
from outrider.core.prompts import Prompt, read_prompts
from outrider.drafting.plan.calibrate import measure_pass
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.drafting.propose.leaves import draft_models
from outrider.lab.loadgen.client import run_load
from outrider.lab.loadgen.settings import Settings
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.runtime.machine import commit, hardware, versions
from outrider.scale.estimate.pair import Acceptance
from outrider.scale.fleet.arrivals import Arrival
from outrider.scale.fleet.costs import ServerCosts
from outrider.scale.fleet.replica import PUBLISH_SECONDS, ReplicaSettings
from outrider.scale.fleet.simulation import Fleet, Result
from outrider.scale.fleet.speculation import fixed, off

_CONTEXT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One measurement of the server."""

    streams: int
    k: int
    requests: int
    max_tokens: int
    wall: float  # seconds
    cpu: float  # seconds of the server's process
    tokens: int
    chunks: int
    prompts: list[int]  # prompt tokens of each request
    counters: dict[str, float]  # changes of the server's metrics

    def counted(self, name: str) -> float:
        """Return the change of a counter of the server."""
        return self.counters[f"outrider_{name}_total"]


def main(
    target: Annotated[str, typer.Option(help="Default: the embedded mini.")] = str(embedded("mini")),
    draft: Annotated[str, typer.Option(help="Default: the embedded nano.")] = str(embedded("nano")),
    *,
    k: Annotated[int, typer.Option(min=1, help="Draft tokens.")] = 3,
    streams: Annotated[str, typer.Option(help="Loads to compare.")] = "1,4,16,64",
    fitted: Annotated[str, typer.Option(help="Loads to measure the work of the server at.")] = "2,8,32",
    rounds: Annotated[int, typer.Option(min=0)] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    seed: int = 0,
    saved: Annotated[
        str | None,
        typer.Option(
            help="File that keeps the measurements. Those of earlier runs count, too; --rounds 0: only those."
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="File for the costs, for outrider fleet --costs.")] = None,
) -> None:
    """Run the measurement and the simulation."""
    levels, fit_levels = ([int(level) for level in text.split(",")] for text in (streams, fitted))
    slots = max(*levels, *fit_levels)
    kept = Path(saved) if saved else None
    passes, turns = read(kept)
    # Passes and turns belong together: other programs slow down both.
    if passes is None or rounds:
        passes = measure_passes(target, draft, slots=slots)
    if rounds:
        append(kept, {"passes": passes.dumps()})
        plan = [(level, drafts, max_tokens) for level in levels for drafts in (0, k)]
        plan += [(level, drafts, count) for level in fit_levels for drafts in (0, k) for count in (8, max_tokens)]
        with served(server_options(target, draft, k, slots)) as server:
            for turn in measure_all(server, AutoTokenizer.from_pretrained(target), plan, rounds, fixed_k=k, seed=seed):
                turns.append(turn)
                append(kept, asdict(turn))
    acceptance = acceptance_of(turn for turn in turns if turn.streams in fit_levels and turn.k)
    costs = fit_server(passes, [turn for turn in turns if turn.streams in fit_levels])
    if out:
        Path(out).write_text(costs.dumps(), encoding="utf-8")
    rows = [compare(turns, level, drafts, costs, acceptance, slots) for level in levels for drafts in (0, k)]
    show(rows)
    print(json.dumps(document(rows, acceptance, costs, passes)))


def server_options(target: str, draft: str, k: int, slots: int) -> list[str]:
    """Return the options of the server."""
    options = ["--target", target, "--proposer", f"draft:{draft}", "--k", str(k), "--threads", "1"]
    return [*options, "--max-num-seqs", str(slots), "--max-model-len", str(_CONTEXT), "--no-prefix-caching"]


def document(
    rows: list[dict[str, Any]], acceptance: Acceptance, costs: ServerCosts, passes: CostModel
) -> dict[str, Any]:
    """Return the results, and what they were computed from."""
    return {
        "benchmark": "simulated server",
        "results": rows,
        "acceptance": acceptance.rates,
        "server": {
            "round_seconds": costs.costs.host,
            "draft_round_seconds": costs.draft_round_seconds,
            "sequence_seconds": costs.sequence_seconds,
            "draft_sequence_seconds": costs.draft_sequence_seconds,
            "chunk_seconds": costs.chunk_seconds,
            "request_seconds": costs.request_seconds,
        },
        "passes": asdict(passes),
        "pass_factor": costs.costs.target.seconds[0] / passes.target.seconds[0],
        "load_average": os.getloadavg(),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "commit": commit(),
    }


def read(file: Path | None) -> tuple[CostModel | None, list[Turn]]:
    """Return the latest passes and all turns of a file of measurements; none if it does not exist."""
    if file is None or not file.exists():
        return None, []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    turns = [Turn(**line) for line in lines if "passes" not in line]
    passes = [CostModel.loads(line["passes"]) for line in lines if "passes" in line]
    return passes[-1] if passes else None, turns


def append(file: Path | None, line: dict[str, Any]) -> None:
    """Append a JSON line to a file, if there is one."""
    if file is None:
        return
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def measure_passes(target: str, draft: str, *, slots: int) -> CostModel:
    """Measure the passes in CPU time, because other programs interrupt those that take long."""
    outrider.drafting.plan.calibrate.perf_counter = time.process_time
    llm = LLM(target, proposer=f"draft:{draft}", k=1, threads=1, max_num_seqs=slots, max_model_len=_CONTEXT)
    models = (llm.parts.target, draft_models(llm.parts.proposer)[0])
    target, drafter = map(measure_pass, models)
    return CostModel(target=target, draft=drafter)


def measure_all(
    server: Server, tokenizer: Any, plan: list[tuple[int, int, int]], rounds: int, *, fixed_k: int, seed: int
) -> Iterator[Turn]:
    """Yield the measurements of the plan (streams, k, tokens of an output) in each round, in random order."""
    prompts = read_prompts(None)
    for round in range(-1, rounds):  # round -1 warms up
        rng = random.Random(f"{seed}/{round}")
        for level, drafts, count in rng.sample(plan, len(plan)) if round >= 0 else plan[:2]:
            shuffled = rng.sample(prompts, len(prompts))
            turn = measure(server, shuffled, level, drafts, count, tokenizer, fixed_k=fixed_k)
            if round >= 0:
                yield turn


def measure(
    server: Server, prompts: list[Prompt], streams: int, k: int, max_tokens: int, tokenizer: Any, *, fixed_k: int
) -> Turn:
    """Send requests from so many clients, and return what the server did for them."""
    requests = max(8, 2 * streams)
    settings = Settings(
        base_url=server.url,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        max_concurrency=streams,
        num_requests=requests,
        k=None if k == fixed_k else k,
    )
    before, cpu = server.rest(), cpu_seconds(server)
    results, wall = asyncio.run(run_load(settings, prompts))
    used = cpu_seconds(server) - cpu
    after = server.gauges()
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
    return Turn(
        streams=streams,
        k=k,
        requests=requests,
        max_tokens=max_tokens,
        wall=wall,
        cpu=used,
        tokens=sum(result.tokens for result in results),
        chunks=sum(len(result.times) for result in results),
        prompts=[count_tokens(tokenizer, prompts[i % len(prompts)]) for i in range(requests)],
        counters={name: value - before.get(name, 0.0) for name, value in after.items()},
    )


def count_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """Return the tokens of a prompt."""
    if prompt.messages:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False).input_ids)
    return len(tokenizer(prompt.prompt).input_ids)


def cpu_seconds(server: Server) -> float:
    """Return the CPU time of the threads of the server so far."""
    assert server.process is not None
    # `stat` counts ticks of 10 ms, which is too coarse for a few short requests.
    threads = Path(f"/proc/{server.process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def acceptance_of(turns: Iterable[Turn]) -> Acceptance:
    """Return the acceptance by position over these turns."""
    sums: dict[str, float] = defaultdict(float)
    for turn in turns:
        for name, value in turn.counters.items():
            sums[name] += value
    rates = []
    for position in range(64):
        label = f'{{position="{position}"}}'
        reached = sums[f"outrider_reached_by_position_total{label}"]
        if not reached:
            break
        rates.append(sums[f"outrider_accepted_by_position_total{label}"] / reached)
    return Acceptance(rates=tuple(rates), repeat_last=True)


def simulate(turn: Turn, costs: ServerCosts, acceptance: Acceptance, slots: int, *, seed: int) -> Result:
    """Simulate the requests of a turn, on a core of its own.

    The server publishes chunks at intervals of wall time. If it had a core for a share of the time only, an interval is
    that share in CPU time.
    """
    settings = ReplicaSettings(
        server=costs,
        acceptance=acceptance,
        max_num_seqs=slots,
        publish_seconds=PUBLISH_SECONDS * min(turn.cpu / turn.wall, 1.0),
    )
    fleet = Fleet(settings, fixed(turn.k) if turn.k else off, replicas=1, routing="least-loaded", seed=seed)
    requests = [Arrival(time=0.0, prompt=prompt, output=turn.max_tokens) for prompt in turn.prompts]
    return fleet.run_closed(requests, concurrency=turn.streams)


def fit_server(passes: CostModel, turns: list[Turn]) -> ServerCosts:
    """Fit what the server does outside of passes, and how much longer passes take beside other programs.

    The CPU time of a turn is f passes + a rounds + g rounds with draft tokens + s decoding sequences of rounds + d
    sequences with draft tokens + c chunks + r requests. Passes were measured at their fastest, so f is at least 1; the
    others are at least 0. All amounts are counts of the server, not of a simulation. Each shape counts with its median
    turn.
    """
    rows, values = [], []
    for turn in typical(turns):
        expected = pass_seconds(passes, turn)
        rounds, sequences = turn.counted("rounds"), turn.counted("passes")
        drafts = (rounds, sequences) if turn.k else (0.0, 0.0)
        amounts = (expected, rounds, drafts[0], sequences, drafts[1], turn.chunks, turn.requests)
        rows.append([amount / turn.cpu for amount in amounts])  # the relative error counts
        values.append((turn.cpu - expected) / turn.cpu)
    slower, *seconds = nonnegative_least_squares(np.array(rows), np.array(values))
    draft = passes.draft and scaled(passes.draft, 1 + slower)
    return ServerCosts(
        costs=replace(passes, target=scaled(passes.target, 1 + slower), draft=draft, host=seconds[0]),
        draft_round_seconds=seconds[1],
        sequence_seconds=seconds[2],
        draft_sequence_seconds=seconds[3],
        chunk_seconds=seconds[4],
        request_seconds=seconds[5],
    )


def pass_seconds(passes: CostModel, turn: Turn) -> float:
    """Return the expected seconds of the passes that the server counted, as if all rounds were alike."""
    rounds, sequences = turn.counted("rounds"), turn.counted("passes")
    seqs = sequences / rounds
    cached = (sum(turn.prompts) / turn.requests) + turn.max_tokens / 2
    fed = (sum(turn.prompts) - turn.requests) / rounds  # the last token of a prompt has logits
    tokens = seqs + turn.counted("draft_tokens") / rounds
    seconds = passes.target(tokens, seqs=seqs, cached=cached, feed=fed)
    if turn.k and passes.draft:
        # The draft model reads the prompts as well.
        seconds += turn.k * passes.draft(seqs, seqs=seqs, cached=cached)
        seconds += passes.draft(0, seqs=0, cached=0, feed=fed) - passes.draft(0, seqs=0, cached=0)
    return rounds * seconds


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> list[float]:
    """Return x >= 0 that minimizes |matrix x - values|, by trying which entries are above 0."""
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.square(values).sum())
    for columns in (list(each) for size in range(1, count + 1) for each in combinations(range(count), size)):
        solution = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
        error = float(np.square(matrix[:, columns] @ solution - values).sum())
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[columns] = solution
    return best.tolist()


def typical(turns: list[Turn]) -> list[Turn]:
    """Return the turn with the median CPU time of each shape."""
    shapes = defaultdict(list)
    for turn in turns:
        shapes[turn.streams, turn.k, turn.max_tokens].append(turn)
    return [sorted(each, key=lambda turn: turn.cpu)[len(each) // 2] for each in shapes.values()]


def scaled(cost: PassCost, factor: float) -> PassCost:
    """Return passes that take `factor` times as long."""
    return replace(
        cost,
        seconds=tuple(factor * seconds for seconds in cost.seconds),
        entry=factor * cost.entry,
        pair=factor * cost.pair,
        fed=None if cost.fed is None else factor * cost.fed,
        expert=factor * cost.expert,
    )


def compare(
    turns: list[Turn], level: int, k: int, costs: ServerCosts, acceptance: Acceptance, slots: int
) -> dict[str, Any]:
    """Return the measured and the simulated tokens/s of one load, as medians over the rounds."""
    chosen = [turn for turn in turns if (turn.streams, turn.k) == (level, k)]
    results = [simulate(turn, costs, acceptance, slots, seed=number) for number, turn in enumerate(chosen)]
    simulated = [result.tokens_per_s for result in results]
    measured = [turn.tokens / turn.cpu for turn in chosen]
    return {
        "streams": level,
        "k": k,
        "wall_tokens_per_s": median(turn.tokens / turn.wall for turn in chosen),
        "measured_tokens_per_s": median(measured),
        "simulated_tokens_per_s": median(simulated),
        "ratio": median(simulated) / median(measured),
        "measured_by_round": measured,
        "cpu_share": median(turn.cpu / turn.wall for turn in chosen),
        "measured_tau": median(turn.tokens / turn.counted("passes") for turn in chosen),
        "simulated_tau": median(result.counts[0].tokens / result.counts[0].passes for result in results),
        "measured_chunks": median(turn.chunks for turn in chosen),
        "simulated_chunks": median(result.counts[0].chunks for result in results),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    table = Table(title="tokens/s on a core of its own: measured by CPU time, and simulated (medians)")
    for name in ("streams", "k", "by wall time", "measured", "simulated", "ratio", "tau", "simulated tau", "CPU share"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["streams"]),
            str(row["k"]),
            f"{row['wall_tokens_per_s']:.0f}",
            f"{row['measured_tokens_per_s']:.0f}",
            f"{row['simulated_tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['measured_tau']:.2f}",
            f"{row['simulated_tau']:.2f}",
            f"{row['cpu_share']:.0%}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
