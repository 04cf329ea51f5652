"""Train a model to add with the GRPO loop of Outrider. Prints a line of JSON for each step.

    python -m recipes.arithmetic.grpo --steps 30 --checkpoint adder

The same command goes on from the checkpoint, with the tokens that it would have sampled without the interruption.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.models.loader.embedded import embedded
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, GRPOSettings, RolloutEngine
from recipes.arithmetic.problems import accuracy, as_problems, pairs_below, reward, split


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    proposer: Annotated[str, typer.Option(help="none: without speculation.")] = "group",
    k: Annotated[int, typer.Option(help="Draft tokens per round.")] = 4,
    steps: int = 30,
    problems: Annotated[int, typer.Option(help="Problems per step.")] = 4,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 12,
    limit: Annotated[int, typer.Option(min=3, help="The numbers are below it.")] = 10,
    lr: float = 1e-5,
    beta: Annotated[float, typer.Option(help="Weight of the KL penalty.")] = 0.0,
    checkpoint: Path | None = None,
) -> None:
    """Train a model to add."""
    folder = model or embedded("mini")
    settings = GRPOSettings(problems=problems, samples=samples, max_tokens=max_tokens, lr=lr, beta=beta, micro_batch=32)
    engine = RolloutEngine.load(
        folder, proposer=proposer, k=k, dtype="float32", max_num_seqs=problems * samples, max_model_len=128
    )
    trained, held_out = (as_problems(pairs, engine) for pairs in split(pairs_below(limit)))
    run = GRPO(load_trainable(folder, torch.device("cpu")).model, engine, reward, settings)
    _print({"accuracy_before": accuracy(engine, held_out, max_tokens)})
    if checkpoint and (checkpoint / "grpo.pt").exists():
        run.restore(checkpoint)
    for report in run.train(trained, steps, checkpoint=checkpoint):
        seconds = report.seconds
        _print(
            {
                "step": report.step,
                "reward": report.mean_reward,
                "tau": report.speculation.tau,
                "logprob_error": report.logprob_error,
                "seconds": round(seconds.total, 2),
                "generation_share": round(seconds.generation_share, 2),
            }
        )
    _print({"accuracy_after": accuracy(engine, held_out, max_tokens)})


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
