"""Rollouts with each proposer against plain decoding, over epochs in which the policy changes.

    python benchmarks/rl/rollouts.py --target DIR --proposers "none;group;quantized:int4;draft:DIR"

All proposers generate the same prompts with the same seeds, in turns. Before each epoch but the first, the policy gets
new weights: the old ones plus noise, as much as `--drift` times the standard deviation of each weight. The speedup is
the ratio of the processor times of plain decoding and the proposer, which a busy machine changes less than the time of
the clock. On the native kernels the script also checks that all proposers give the same tokens. Prints a table and one
JSON document.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider import SamplingParams
from outrider.core.prompts import read_prompts
from outrider.lab.common.jobs import encode_prompt
from outrider.models.loader.embedded import embedded
from outrider.train.rl import RolloutBatch, RolloutEngine

_DEFAULT = "none;group;suffix:100000;quantized:int4"


def main(
    target: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    proposers: Annotated[str, typer.Option(help="Separated by semicolons. The first one is the baseline.")] = _DEFAULT,
    limit: Annotated[int, typer.Option(help="Embedded prompts of each category.")] = 1,
    n: Annotated[int, typer.Option(help="Samples of each prompt.")] = 8,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at once; few are the tail of a step. 0: all.")] = 0,
    max_tokens: int = 96,
    epochs: int = 3,
    drift: Annotated[float, typer.Option(help="Noise of an update, as a share of a weight's deviation.")] = 0.01,
    k: Annotated[str, typer.Option(help="Draft tokens per round, or auto.")] = "auto",
    dtype: str = "bfloat16",
) -> None:
    """Measure rollouts with several proposers."""
    folder = target or embedded("mini")
    prompts = read_prompts(limit=limit)
    engines = {
        name: RolloutEngine.load(
            folder,
            proposer=name,
            k=k if k == "auto" else int(k),
            verifier="coupled",
            dtype=dtype,
            max_num_seqs=max_num_seqs or len(prompts) * n,
            max_model_len=1024,
        )
        for name in proposers.split(";")
    }
    first = next(iter(engines.values()))
    chats = [encode_prompt(first.llm, prompt) for prompt in prompts]
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    model = first.llm.parts.loaded.checkpoint.model
    weights = {name: value.detach().float().clone() for name, value in model.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    for epoch in range(epochs):
        update_seconds = dict.fromkeys(engines, 0.0)
        if epoch:
            _perturb(weights, drift, noise)
            update_seconds = {name: _update(engine, weights) for name, engine in engines.items()}
        runs = {name: _generate(engine, chats, params, n=n, seed=epoch) for name, engine in engines.items()}
        baseline = next(iter(runs.values()))
        for name, run in runs.items():
            row = {"epoch": epoch, "proposer": name, **_figures(run, baseline)}
            rows.append(row | {"update_seconds": update_seconds[name]})
    _show(rows)
    print(json.dumps({"benchmark": "rl rollouts", "drift": drift, "k": k, "rows": rows}))


class _Run(NamedTuple):
    """The rollouts of one engine in one epoch."""

    batch: RolloutBatch
    cpu_seconds: float


def _generate(
    engine: RolloutEngine, chats: Sequence[Sequence[int]], params: SamplingParams, *, n: int, seed: int
) -> _Run:
    began = time.process_time()
    batch = engine.generate(chats, params, n=n, seed=seed)
    return _Run(batch, time.process_time() - began)


def _update(engine: RolloutEngine, weights: dict[str, torch.Tensor]) -> float:
    """Give an engine new weights. Returns the processor time that it takes, in seconds."""
    began = time.process_time()
    engine.update_weights(weights)
    return time.process_time() - began


def _figures(run: _Run, baseline: _Run) -> dict[str, Any]:
    """Return the figures of a run beside those of plain decoding."""
    stats = run.batch.stats
    return {
        "tau": stats.tau,
        "tokens": stats.output_tokens,
        "cpu_seconds": run.cpu_seconds,
        "wall_seconds": run.batch.seconds,
        "speedup": baseline.cpu_seconds / run.cpu_seconds,
        "same_tokens": _tokens(run.batch) == _tokens(baseline.batch),
        "regimes": [
            {"most": each.most, "tokens": each.tokens, "tau": each.tau, "draft_length": each.draft_length}
            for each in run.batch.regimes
        ],
    }


def _perturb(weights: dict[str, torch.Tensor], drift: float, noise: torch.Generator) -> None:
    """Add noise to weights. Tied weights stay equal."""
    changed: dict[int, torch.Tensor] = {}
    for name, value in weights.items():
        key = hash((value.shape, float(value.flatten()[0]), float(value.flatten()[-1])))
        if key not in changed:
            deviation = value.std() if value.numel() > 1 else value.abs().mean()
            changed[key] = value + drift * deviation * torch.randn(value.shape, generator=noise)
        weights[name] = changed[key]


def _tokens(batch: RolloutBatch) -> list[tuple[int, ...]]:
    return [rollout.token_ids for rollout in batch.rollouts]


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("epoch", "proposer", "tau", "tokens/CPU s", "speedup", "update, s", "same tokens")
    for row in rows:
        table.add_row(
            str(row["epoch"]),
            row["proposer"],
            f"{row['tau']:.2f}",
            f"{row['tokens'] / row['cpu_seconds']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['update_seconds']:.2f}",
            "yes" if row["same_tokens"] else "NO",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
