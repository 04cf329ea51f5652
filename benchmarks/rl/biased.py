"""Biased speculation in GRPO: a draft that leans toward rewarded answers, with and without importance weights.

    python benchmarks/rl/biased.py --draft DIR --share 0.2 --seeds 0,1,2

The draft model is fine-tuned on the rewarded rollouts of each step. "exact" verifies with `rejection`, so the draft
changes the speed only. "weighted" verifies with `blend`, whose samples follow (1 - s) p + s q, and weighs each token by
the ratio of its probabilities under the policy and under the blend. "biased" has no weights. All runs have the same
number of rollouts. The accuracy is that of the policy alone, sampled without a draft on held-out problems.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider import SamplingParams
from outrider.models.loader.embedded import embedded
from outrider.train.model.draft_model import load_trainable
from outrider.train.rl import GRPO, GRPOSettings, Problem, Rollout, RolloutEngine, StepReport
from recipes.arithmetic.word_problems import reward, word_problems

_IMPORTANCE_CAP = 2.0
_RUNS = "exact,weighted,biased"
_MAX_TOKENS = 96  # of an answer
_CONTEXT = 512


class LeaningDraft:
    """Fine-tunes a draft model on rewarded rollouts, and gives it to the engine."""

    def __init__(self, engine: RolloutEngine, folder: Path, lr: float) -> None:
        self._engine = engine
        self._model = load_trainable(folder, torch.device("cpu")).model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, weight_decay=0.0)
        self.rewarded: list[Rollout] = []

    def train(self) -> None:
        """Train on the rewarded rollouts of the last step."""
        if not self.rewarded:
            return
        self._optimizer.zero_grad()
        count = sum(len(rollout.token_ids) for rollout in self.rewarded)
        for rollout in self.rewarded:
            tokens = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
            logits = self._model(input_ids=tokens, use_cache=False).logits[0, len(rollout.prompt_token_ids) - 1 : -1]
            labels = torch.tensor(rollout.token_ids)
            (torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / count).backward()
        self._optimizer.step()
        self.rewarded = []
        self._engine.update_draft({name: value.detach() for name, value in self._model.state_dict().items()})


class LeaningRun:
    """GRPO with speculation whose draft is trained on the rewarded rollouts of each step."""

    def __init__(
        self, folder: Path, draft: Path, verifier: str, *, k: int, draft_lr: float, settings: GRPOSettings
    ) -> None:
        engine = RolloutEngine.load(
            folder,
            proposer=f"draft:{draft}",
            k=k,
            verifier=verifier,
            dtype="float32",
            max_num_seqs=16,
            max_model_len=_CONTEXT,
            allow_lossy=None if verifier == "rejection" else verifier,
        )
        self._draft = LeaningDraft(engine, draft, draft_lr)
        self._grpo = GRPO(load_trainable(folder, torch.device("cpu")).model, engine, self._judge, settings)

    def train(self, problems: Sequence[Problem], steps: int) -> Iterator[StepReport]:
        """Train the policy, and the draft after each step. Yields a report for each step."""
        for report in self._grpo.train(problems, steps):
            self._draft.train()
            yield report

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the policy."""
        return {name: value.detach() for name, value in self._grpo.policy.state_dict().items()}

    def _judge(self, rollout: Rollout, problem: Problem) -> float:
        value = reward(rollout, problem)
        if value:
            self._draft.rewarded.append(rollout)
        return value


def main(
    draft: Annotated[Path, typer.Option(help="Folder of a draft model.")],
    target: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    share: Annotated[float, typer.Option(help="The weight of the draft in the blend.")] = 0.2,
    k: Annotated[int, typer.Option(help="Draft tokens per round.")] = 4,
    steps: int = 40,
    every: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 10,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    runs: Annotated[str, typer.Option(help="Of exact, weighted and biased, separated by commas.")] = _RUNS,
    problems: int = 2,
    samples: int = 16,
    trained_samples: int = 8,
    lr: float = 1e-5,
    draft_lr: float = 1e-4,
    held_out: Annotated[int, typer.Option(help="Held-out problems.")] = 32,
) -> None:
    """Compare exact and biased speculation."""
    folder = target or embedded("mini")
    kinds = kinds_of(runs, share)
    settings = GRPOSettings(
        problems=problems,
        samples=samples,
        trained_samples=trained_samples,
        max_tokens=_MAX_TOKENS,
        lr=lr,
        micro_batch=32,
    )
    lines: list[dict[str, Any]] = []
    for seed in map(int, seeds.split(",")):
        evaluator = RolloutEngine.load(
            folder, proposer="none", dtype="float32", max_num_seqs=32, max_model_len=_CONTEXT
        )
        todo, unseen = word_problems(evaluator, 64, seed=seed), word_problems(evaluator, held_out, seed=1000)
        for name, (verifier, cap) in kinds.items():
            own = replace(settings, importance_cap=cap, seed=seed)
            run = LeaningRun(folder, draft, verifier, k=k, draft_lr=draft_lr, settings=own)
            for report in run.train(todo, steps):
                line = {
                    "seed": seed,
                    "run": name,
                    "step": report.step,
                    "reward": report.mean_reward,
                    "tau": report.speculation.tau,
                }
                if report.step % every == 0:
                    evaluator.update_weights(run.weights())
                    line["accuracy"] = accuracy(evaluator, unseen)
                lines.append(line)
                print(json.dumps(line), flush=True)
    show(lines, list(kinds))


def kinds_of(runs: str, share: float) -> dict[str, tuple[str, float | None]]:
    """Return the verifier and the importance cap of each kind of run.

    Raises:
        typer.BadParameter: a kind is unknown.
    """
    if unknown := set(runs.split(",")) - set(_RUNS.split(",")):
        raise typer.BadParameter(f"--runs has {min(unknown)}; use some of {_RUNS}")
    blend = f"blend:share={share}"
    every_kind: dict[str, tuple[str, float | None]] = {
        "exact": ("rejection", None),
        "weighted": (blend, _IMPORTANCE_CAP),
        "biased": (blend, None),
    }
    return {name: every_kind[name] for name in runs.split(",")}


def accuracy(engine: RolloutEngine, problems: Sequence[Problem]) -> float:
    """Return the mean reward of sampled answers of the policy alone."""
    prompts = [problem.prompt for problem in problems]
    batch = engine.generate(prompts, SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS), n=4, seed=7)
    return mean(reward(rollout, problems[rollout.prompt]) for rollout in batch.rollouts)


def show(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Print the figures of each kind of run, one for each seed."""
    table = Table("run", "accuracy at the end", "mean accuracy of all evaluations", "reward of the rollouts", "tau")
    for name in names:
        by_seed: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            if line["run"] == name:
                by_seed[line["seed"]].append(line)
        runs = list(by_seed.values())
        evaluated = [[line["accuracy"] for line in run if "accuracy" in line] for run in runs]
        table.add_row(
            name,
            ", ".join(f"{values[-1]:.3f}" for values in evaluated),
            ", ".join(f"{mean(values):.3f}" for values in evaluated),
            ", ".join(f"{mean(line['reward'] for line in run):.3f}" for run in runs),
            ", ".join(f"{mean(line['tau'] for line in run):.2f}" for run in runs),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
