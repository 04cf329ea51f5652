"""Stop rollouts that will fail, with and without speculation: do the two speedups multiply?

    python benchmarks/rl/stopping.py --proposer group

A value head predicts from the log-probabilities of an answer so far whether it will be rewarded. It is a logistic
regression, trained on whole rollouts of other problems. A rollout whose value falls below a threshold is stopped and
counts as a failure. The threshold is the highest that stops at most `--lost` of the rewarded rollouts of the training
set. Each of the four combinations has its own engine. They generate the same problems with the same seeds, in turns. A
speedup is the ratio of processor times. Stopping changes which answers are complete, so it is not exact.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider import SamplingParams
from outrider.models.loader.embedded import embedded
from outrider.train.rl import Problem, Rollout, RolloutEngine
from recipes.arithmetic.word_problems import reward, word_problems

_EVERY = 4  # tokens between two looks at a rollout
_FIRST = 8  # tokens before the first look
_NEWTON_STEPS = 20
_RIDGE = 1e-2

Stop = Callable[[Sequence[float]], bool]


def features(logprobs: Sequence[float]) -> NDArray[np.float64]:
    """Return what the value head sees of an answer."""
    values = np.asarray(logprobs)
    return np.array([1.0, values.mean(), values.min(), values[-_EVERY:].mean(), (values < -1).sum(), len(values) / 64])


class ValueHead:
    """Predicts the probability that an answer will be rewarded (logistic regression, by Newton's method)."""

    def __init__(self, inputs: NDArray[np.float64], rewarded: NDArray[np.float64]) -> None:
        self._mean = inputs.mean(0)
        self._mean[0] = 0.0
        self._scale = inputs.std(0) + 1e-9
        self._scale[0] = 1.0
        x = (inputs - self._mean) / self._scale
        self._weights = np.zeros(x.shape[1])
        for _ in range(_NEWTON_STEPS):
            p = 1 / (1 + np.exp(-x @ self._weights))
            gradient = x.T @ (p - rewarded) + _RIDGE * self._weights
            hessian = (x * (p * (1 - p))[:, None]).T @ x + _RIDGE * np.eye(x.shape[1])
            self._weights -= np.linalg.solve(hessian, gradient)

    def value(self, logprobs: Sequence[float]) -> float:
        """Return the value of an answer so far."""
        x = (features(logprobs) - self._mean) / self._scale
        return float(1 / (1 + np.exp(-x @ self._weights)))


def looks(rollout: Rollout) -> list[Sequence[float]]:
    """Return the log-probabilities that the value head sees while a rollout grows."""
    return [rollout.logprobs[:end] for end in range(_FIRST, len(rollout.logprobs), _EVERY)]


def train(rollouts: Sequence[Rollout], rewards: Sequence[float], lost: float) -> tuple[ValueHead, float]:
    """Return a value head and its threshold."""
    pairs = list(zip(rollouts, rewards, strict=True))
    rows = [(features(look), value) for rollout, value in pairs for look in looks(rollout)]
    head = ValueHead(np.stack([row for row, _ in rows]), np.array([value for _, value in rows]))
    lowest = sorted(
        min((head.value(look) for look in looks(rollout)), default=1.0) for rollout, value in pairs if value
    )
    return head, lowest[int(lost * len(lowest))] if lowest else 0.0


def learn(
    engine: RolloutEngine, problems: Sequence[Problem], params: SamplingParams, *, n: int, lost: float
) -> tuple[ValueHead, float]:
    """Return a value head and its threshold, learned from whole rollouts of these problems."""
    batch = engine.generate([problem.prompt for problem in problems], params, n=n, seed=999)
    return train(batch.rollouts, [reward(rollout, problems[rollout.prompt]) for rollout in batch.rollouts], lost)


def generate(
    engine: RolloutEngine, problems: Sequence[Problem], params: SamplingParams, *, n: int, seed: int, stop: Stop | None
) -> tuple[list[Rollout], int]:
    """Return the finished rollouts, and the number of stopped ones."""
    waiting = set(engine.submit([problem.prompt for problem in problems], params, n=n, seed=seed))
    done: list[Rollout] = []
    seen: dict[int, int] = defaultdict(lambda: _FIRST)
    while waiting:
        finished = engine.step()
        done += finished.values()
        waiting -= finished.keys()
        if stop is None:
            continue
        for id in list(waiting):
            logprobs = engine._pending[id].seq.logprobs
            if len(logprobs) >= seen[id]:
                seen[id] = len(logprobs) + _EVERY
                if stop([each.logprob for each in logprobs]):
                    engine.cancel([id])
                    waiting.remove(id)
    return done, len(problems) * n - len(done)


def main(
    proposer: str = "group",
    target: Annotated[Path | None, typer.Option(help="Folder of the policy. Default: the embedded target.")] = None,
    k: Annotated[str, typer.Option(help="Draft tokens per round, or auto.")] = "auto",
    lost: Annotated[float, typer.Option(help="Share of rewarded rollouts that may be stopped.")] = 0.05,
    steps: Annotated[int, typer.Option(help="Steps of a problem.")] = 3,
    problems: int = 8,
    samples: int = 16,
    max_num_seqs: int = 4,
    max_tokens: int = 96,
    rounds: int = 5,
    dtype: str = "float32",
) -> None:
    """Measure stopping and speculation."""

    def load(name: str) -> RolloutEngine:
        return RolloutEngine.load(
            target or embedded("mini"),
            proposer=name,
            k=k if k == "auto" else int(k),
            verifier="coupled",
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=512,
        )

    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    teacher = load("none")
    known = word_problems(teacher, 4 * problems, steps=steps, seed=1)
    head, threshold = learn(teacher, known, params, n=samples, lost=lost)

    def stop(logprobs: Sequence[float]) -> bool:
        return head.value(logprobs) < threshold

    # Each one has its own engine: a history of the others' rollouts would help its draft.
    rules: dict[str, tuple[RolloutEngine, Stop | None]] = {
        "neither": (load("none"), None),
        "stopping": (load("none"), stop),
        "speculation": (load(proposer), None),
        "both": (load(proposer), stop),
    }
    tallies = {name: Tally() for name in rules}
    for turn in range(rounds + 1):
        todo = word_problems(teacher, problems, steps=steps, seed=100 + turn)
        for name, (engine, rule) in rules.items():
            began = time.process_time()
            done, stopped = generate(engine, todo, params, n=samples, seed=turn, stop=rule)
            if turn:  # the first one is a warm-up
                seconds = time.process_time() - began
                rewarded = sum(bool(reward(rollout, todo[rollout.prompt])) for rollout in done)
                tallies[name].add(seconds, rewarded=rewarded, stopped=stopped)
    show(tallies, total=rounds * problems * samples, threshold=threshold)


@dataclass
class Tally:
    """What one of the four combinations did."""

    seconds: list[float] = field(default_factory=list)  # of each turn
    rewarded: int = 0  # rollouts
    stopped: int = 0

    def add(self, seconds: float, *, rewarded: int, stopped: int) -> None:
        """Add a turn."""
        self.seconds.append(seconds)
        self.rewarded += rewarded
        self.stopped += stopped


def show(tallies: dict[str, Tally], *, total: int, threshold: float) -> None:
    """Print a table and a JSON document. `total` is the number of rollouts of each combination."""
    base = tallies["neither"]
    ratios = {
        name: [plain / own for plain, own in zip(base.seconds, tally.seconds, strict=True)]
        for name, tally in tallies.items()
    }
    table = Table("", "speedup", "lowest to highest", "stopped", "rewarded rollouts kept", "rewarded per second")
    for name, tally in tallies.items():
        values = ratios[name]
        rate = tally.rewarded / sum(tally.seconds) / (base.rewarded / sum(base.seconds))
        table.add_row(
            name,
            f"{median(values):.2f}",
            f"{min(values):.2f} to {max(values):.2f}",
            f"{tally.stopped / total:.0%}",
            f"{tally.rewarded / base.rewarded:.0%}",
            f"{rate:.2f}",
        )
    Console(width=110).print(table)
    product = median(ratios["stopping"]) * median(ratios["speculation"])
    print(f"product of the two speedups: {product:.2f}; measured together: {median(ratios['both']):.2f}")
    rewarded = {name: tally.rewarded for name, tally in tallies.items()}
    print(json.dumps({"benchmark": "stopping", "threshold": threshold, "speedup": ratios, "rewarded": rewarded}))


if __name__ == "__main__":
    typer.run(main)
