"""A draft length learned by position in the answer, against fixed draft lengths and `k auto`, on rollouts.

    python benchmarks/rl/k_schedule.py --proposer draft:DIR --fixed 2,4,8

The schedule is learned from rollouts with the longest fixed draft length: by phase (the index of the output token in
steps of `--phase` tokens), the acceptance by position and the measured costs of passes give the draft length with the
most tokens per second. All contestants then generate the same prompts with other seeds, in turns. Speedups are ratios
of processor times to plain decoding.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider import SamplingParams
from outrider.core.planner import FixedPlanner
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft
from outrider.drafting.plan.known_costs import known_costs
from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.plan.speedup import expected_tau
from outrider.drafting.propose.leaves import draft_models
from outrider.models.loader.embedded import embedded
from outrider.train.rl import RolloutBatch, RolloutEngine
from outrider.train.rl.report import by_phase
from recipes.arithmetic.word_problems import word_problems

_CACHED = 64.0  # tokens in the KV cache, for the cost of a pass


class SchedulePlanner:
    """Gives a sequence the draft length of its phase."""

    def __init__(self, lengths: dict[int, int], phase: int) -> None:
        self._lengths = lengths
        self._phase = phase

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        last = max(self._lengths)
        chosen = (self._lengths[min(seq.num_output_tokens // self._phase, last)] for seq in batch.seqs)
        return batch.limited(tuple(map(min, chosen, batch.draft_budget)))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft


def main(
    proposer: Annotated[str, typer.Option(help="A draft model, draft:DIR.")],
    target: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "2,4,8",
    phase: Annotated[int, typer.Option(help="Output tokens of a phase.")] = 8,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at once.")] = 2,
    problems: int = 8,
    samples: int = 4,
    rounds: int = 5,
    dtype: str = "float32",
) -> None:
    """Compare draft lengths."""
    lengths = sorted(map(int, fixed.split(",")))

    def load(name: str, k: int | str) -> RolloutEngine:
        return RolloutEngine.load(
            target or embedded("mini"),
            proposer=name,
            k=k,
            verifier="coupled",
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=512,
        )

    engines = {"plain": load("none", 0)}
    engines |= {f"k {length}": load(proposer, length) for length in lengths} | {"k auto": load(proposer, "auto")}
    longest = engines[f"k {lengths[-1]}"]
    prompts = [problem.prompt for problem in word_problems(longest, problems)]
    params = SamplingParams(temperature=1.0, max_tokens=96)
    recorded = longest.generate(prompts, params, n=samples, seed=1000)
    parts = longest.llm.parts
    (costs,) = known_costs(parts.target, draft_models(parts.proposer)[:1])
    schedule = learn(recorded, costs, phase=phase, seqs=max_num_seqs, longest=lengths[-1])
    engines["schedule"] = load(proposer, lengths[-1])
    engines["schedule"].llm.engine._planner = SchedulePlanner(schedule, phase)
    assert isinstance(longest.llm.engine._planner, FixedPlanner)
    seconds: dict[str, list[float]] = defaultdict(list)
    taus: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            began = time.process_time()
            batch = engine.generate(prompts, params, n=samples, seed=turn)
            if turn:  # the first one is a warm-up
                seconds[name].append(time.process_time() - began)
            taus[name] = batch.stats.tau
    ratios = {
        name: [plain / own for plain, own in zip(seconds["plain"], values, strict=True)]
        for name, values in seconds.items()
    }
    table = Table("draft length", "tau", "speedup", "lowest to highest")
    for name, values in ratios.items():
        table.add_row(name, f"{taus[name]:.2f}", f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}")
    Console(width=100).print(table)
    document: dict[str, Any] = {"benchmark": "k schedule", "schedule": schedule, "tau": taus, "speedup": ratios}
    print(json.dumps(document))


def learn(batch: RolloutBatch, costs: CostModel, *, phase: int, seqs: int, longest: int) -> dict[int, int]:
    """Return the best draft length of each phase."""

    def tokens_per_second(k: int, acceptance: Sequence[float]) -> float:
        seconds = costs.verify(seqs, k, cached=_CACHED) + costs.propose(seqs, k, cached=_CACHED)
        return expected_tau(acceptance[:k]) / seconds

    figures = by_phase(batch.rollouts, phase)
    return {
        index // phase: max(range(longest + 1), key=lambda k: tokens_per_second(k, figure.acceptance))
        for index, figure in figures.items()
    }


if __name__ == "__main__":
    typer.run(main)
