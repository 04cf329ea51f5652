"""GRPO with several drafts against GRPO with plain decoding, step by step in turns.

    python benchmarks/rl/training.py --proposers "none;group;draft:DIR;draft:DIR+train" --seeds 0,1,2 --plot rl.png

Each proposer has its own policy, optimizer and engine. All of them start with the same weights and the same seed, and
take turns after each step. On the native kernels their tokens, rewards and weights must stay equal, bit by bit; the
script checks that. "+train" trains the draft with the policy. The speedups are ratios of the times of a step with the
first proposer and with another one. On a machine with other work, use --processor-time and OMP_NUM_THREADS=1. Prints a
line of JSON per step and a table at the end.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.models.loader.embedded import embedded
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, DraftTraining, GRPOSettings, RolloutBatch, RolloutEngine, StepReport
from recipes.arithmetic.word_problems import reward, word_problems

_TRAINED = "+train"
_SMOOTH = 10  # steps of a moving mean in the plot


class RecordingEngine(RolloutEngine):
    """Keeps the last rollouts."""

    batch: RolloutBatch

    def generate(self, *args: Any, **options: Any) -> RolloutBatch:
        self.batch = super().generate(*args, **options)
        return self.batch


def main(
    target: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    proposers: Annotated[
        str, typer.Option(help="Separated by semicolons. The first one is the baseline.")
    ] = "none;group",
    k: Annotated[str, typer.Option(help="Draft tokens per round, or auto.")] = "auto",
    steps: int = 100,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    problems: Annotated[int, typer.Option(help="Problems per step.")] = 2,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 32,
    trained_samples: Annotated[int, typer.Option(help="Of them, those that the update uses.")] = 8,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at once.")] = 8,
    max_tokens: int = 96,
    different: Annotated[int, typer.Option(help="Different problems.")] = 64,
    lr: float = 1e-5,
    dtype: str = "float32",
    processor_time: Annotated[bool, typer.Option(help="Count processor time, for a busy machine.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File for the curves.")] = None,
) -> None:
    """Measure GRPO with several drafts."""
    folder = target or embedded("mini")
    names = proposers.split(";")
    lines = []
    for seed in map(int, seeds.split(",")):
        settings = GRPOSettings(
            problems=problems,
            samples=samples,
            trained_samples=trained_samples,
            max_tokens=max_tokens,
            lr=lr,
            micro_batch=32,
            seed=seed,
        )
        runs = {name: _start(folder, name, settings, k=k, dtype=dtype, max_num_seqs=max_num_seqs) for name in names}
        for run in runs.values():
            run.clock = process_time if processor_time else perf_counter
        engines = {name: run.engine for name, run in runs.items()}
        todo = word_problems(engines[names[0]], different, seed=seed)
        for step in range(steps):
            turn = names[step % len(names) :] + names[: step % len(names)]
            reports = {name: runs[name].step(runs[name].problems_of(todo, step)) for name in turn}
            same = all(_tokens(engines[name]) == _tokens(engines[names[0]]) for name in names)
            same_weights = all(_same_weights(runs[name].policy, runs[names[0]].policy) for name in names)
            for name in names:
                line = _line(seed, name, reports[name]) | {"same_tokens": same, "same_weights": same_weights}
                lines.append(line)
                print(json.dumps(line), flush=True)
    _show(lines, names)
    if plot is not None:
        _plot(lines, names, plot)


def _start(folder: Path, name: str, settings: GRPOSettings, *, k: str, dtype: str, max_num_seqs: int) -> GRPO:
    proposer = name.removesuffix(_TRAINED)
    engine = RecordingEngine.load(
        folder,
        proposer=proposer,
        k=k if k == "auto" else int(k),
        verifier="coupled",
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=512,
    )
    draft = DraftTraining(engine, proposer.partition(":")[2]) if name.endswith(_TRAINED) else None
    policy = load_trainable(folder, torch.device("cpu")).model
    return GRPO(policy, engine, reward, settings, draft=draft)


def _tokens(engine: RecordingEngine) -> list[tuple[int, ...]]:
    return [rollout.token_ids for rollout in engine.batch.rollouts]


def _same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _line(seed: int, name: str, report: StepReport) -> dict[str, Any]:
    seconds = report.seconds
    return {
        "seed": seed,
        "proposer": name,
        "step": report.step,
        "reward": report.mean_reward,
        "tau": report.speculation.tau,
        "tokens": report.speculation.tokens,
        "overlap": asdict(report.overlap),
        "generation": seconds.generation,
        "reference": seconds.reference,
        "training": seconds.training,
        "sync": seconds.sync,
        "draft": seconds.draft,
        "total": seconds.total,
        "rolled_back": report.draft_rolled_back,
        "logprob_error": report.logprob_error,
    }


def _ratios(lines: Sequence[dict[str, Any]], names: Sequence[str], name: str, part: str) -> list[float]:
    """Return the speedup of a part of each step."""
    base = {(line["seed"], line["step"]): line[part] for line in lines if line["proposer"] == names[0]}
    return [base[line["seed"], line["step"]] / line[part] for line in lines if line["proposer"] == name]


def _show(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    table = Table("proposer", "generation", "step", "lowest step", "tau, first and last 10", "sync", "same")
    for name in names:
        own = [line for line in lines if line["proposer"] == name]
        last = max(line["step"] for line in own)
        generation, step = (_ratios(lines, names, name, part) for part in ("generation", "total"))
        begin = mean(line["tau"] for line in own if line["step"] <= 10)
        end = mean(line["tau"] for line in own if line["step"] > last - 10)
        table.add_row(
            name,
            f"{median(generation):.2f} ({_totals(lines, names, name, 'generation')})",
            f"{median(step):.2f} ({_totals(lines, names, name, 'total')})",
            f"{min(step):.2f}",
            f"{begin:.2f}, {end:.2f}",
            f"{sum(line['sync'] for line in own) / sum(line['total'] for line in own):.1%}",
            "yes" if all(line["same_tokens"] and line["same_weights"] for line in own) else "NO",
        )
    Console(width=130).print(table)
    own = [line for line in lines if line["proposer"] == names[0]]
    last = max(line["step"] for line in own)
    begin = mean(line["reward"] for line in own if line["step"] <= 10)
    end = mean(line["reward"] for line in own if line["step"] > last - 10)
    share = sum(line["generation"] for line in own) / sum(line["total"] for line in own)
    print(f"reward {begin:.2f} in the first and {end:.2f} in the last 10 steps; generation takes {share:.0%} of a step")


def _totals(lines: Sequence[dict[str, Any]], names: Sequence[str], name: str, part: str) -> str:
    """Return the speedup over all steps of each seed."""
    texts = []
    for seed in sorted({line["seed"] for line in lines}):
        base, own = (
            sum(line[part] for line in lines if line["proposer"] == each and line["seed"] == seed)
            for each in (names[0], name)
        )
        texts.append(f"{base / own:.2f}")
    return ", ".join(texts)


def _plot(lines: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Draw reward, tau and the speedup of the generation, as means over the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    last = max(line["step"] for line in lines)
    for name in names:
        ratios = iter(_ratios(lines, names, name, "generation"))
        own = [line | {"speedup": next(ratios)} for line in lines if line["proposer"] == name]
        label = name.partition(":")[0] + (_TRAINED if name.endswith(_TRAINED) else "")
        for axis, part in zip(axes, ("reward", "tau", "speedup"), strict=True):
            if part == "reward" and name != names[0]:
                continue  # the rewards of all proposers are equal
            by_step = [mean(line[part] for line in own if line["step"] == step) for step in range(1, last + 1)]
            smooth = [mean(by_step[max(0, i - _SMOOTH + 1) : i + 1]) for i in range(last)]
            axis.plot(range(1, last + 1), smooth, label=label)
    for axis, title in zip(axes, ("mean reward", "tau", "speedup of generation"), strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[1].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
