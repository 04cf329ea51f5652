"""A small GRPO loop over torch (Shao et al. 2024, DeepSeekMath).

For each problem the policy samples a group of answers. The advantage of an answer is its reward
minus the mean of its group, divided by the standard deviation of the group. The loss is PPO's
clipped objective over the tokens of all answers, plus a KL penalty against the first policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.train.rl.checkpoint import read_checkpoint, write_checkpoint
from outrider.train.rl.draft_training import DraftTraining
from outrider.train.rl.objective import down_sample, group_advantages
from outrider.train.rl.overlap import Overlap
from outrider.train.rl.peft import merged_weights
from outrider.train.rl.records import RolloutBatch
from outrider.train.rl.report import Speculation, StepReport, StepSeconds, by_draft_age, by_phase, by_version
from outrider.train.rl.rewards import Problem, RewardFunction, compute_rewards
from outrider.train.rl.rollout import RolloutEngine
from outrider.train.rl.settings import GRPOSettings
from outrider.train.rl.update import PolicyUpdater, UpdateFigures


class GRPO:
    """Trains a policy on rollouts of an engine that follows its weights."""

    def __init__(
        self,
        policy: Any,
        engine: RolloutEngine,
        reward: RewardFunction,
        settings: GRPOSettings | None = None,
        *,
        draft: DraftTraining | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            policy: a trainable causal language model of transformers, also with a LoRA adapter of
                PEFT. The engine gets its weights at once.
            engine: samples the rollouts. It must be exact.
            reward: called with a rollout and its problem; returns a number.
            settings: the settings of the run.
            draft: trains the engine's draft after each step. None: the draft stays as it is.
        """
        self.policy = policy.eval()  # without dropout, so that both passes over a token agree
        self.engine = engine
        self.reward = reward
        self.settings = settings or GRPOSettings()
        self.draft = draft
        self.steps = 0  # finished steps
        self._answers: dict[str, list[array[int]]] = {}  # token ids of the last answers to each problem, by group
        self.clock: Callable[[], float] = perf_counter  # of the report's seconds
        recurrent = engine.llm.parts.loaded.checkpoint.recurrent
        self.updater = PolicyUpdater(self.policy, self.settings, share_prompts=not recurrent, draft=draft)
        self.optimizer = self.updater.optimizer
        self.engine.update_weights(merged_weights(policy))

    def train(
        self, problems: Sequence[Problem], steps: int, *, checkpoint: str | Path | None = None, every: int = 1
    ) -> Iterator[StepReport]:
        """Run steps until `steps` are finished, with those of a restored checkpoint. Yield the report of each.

        `checkpoint` is a folder that gets a checkpoint after every `every` steps.

        Raises:
            OutriderError: there are no problems, `every` is below 1, a gradient is not finite, or a
                checkpoint cannot be written.
        """
        if not problems:
            raise OutriderError("there are no problems to train on; give at least one")
        if every < 1:
            raise OutriderError(f"every is {every}; use a number of steps above 0")
        while self.steps < steps:
            yield self.step(self.problems_of(problems, self.steps))
            if checkpoint is not None and self.steps % every == 0:
                self.save(checkpoint)

    def problems_of(self, problems: Sequence[Problem], step: int) -> list[Problem]:
        """Return the problems of a step: the next ones of an order that is shuffled anew in each epoch."""
        chosen = []
        for i in range(step * self.settings.problems, (step + 1) * self.settings.problems):
            epoch, index = divmod(i, len(problems))
            order = torch.Generator().manual_seed(derive_seed(self.settings.seed, epoch) % 2**31)
            chosen.append(problems[int(torch.randperm(len(problems), generator=order)[index])])
        return chosen

    def step(self, problems: Sequence[Problem]) -> StepReport:
        """Sample answers, reward them, update the policy, and give its weights to the engine."""
        settings = self.settings
        seconds = StepSeconds()
        version = self.engine.version
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        with self._timed(seconds, "generation"):
            batch = self.engine.generate(
                [problem.prompt for problem in problems],
                params,
                n=settings.samples,
                seed=derive_seed(settings.seed, 1 + self.steps),
            )
        rolled_back = self.draft is not None and self.draft.judge(batch.stats)
        with self._timed(seconds, "reward"):
            pairs = [(rollout, problems[rollout.prompt]) for rollout in batch.rollouts]
            rewards = compute_rewards(self.reward, pairs, timeout=settings.reward_timeout)
        values = torch.tensor([reward.value for reward in rewards], dtype=torch.float64).view(len(problems), -1)
        if settings.trained_samples is not None:
            values = down_sample(values, settings.trained_samples)
        advantages = group_advantages(values, scale=settings.scale_rewards).flatten()
        used = (~values.isnan()).flatten().tolist()
        # Without a KL penalty, an answer as good as the mean of its group has no gradient.
        learned = [b for b in range(len(rewards)) if used[b] and (settings.beta or advantages[b] != 0)]
        update = UpdateFigures()
        if learned:
            with self._timed(seconds, "reference"):
                rollouts = [batch.rollouts[b] for b in learned]
                batches = self.updater.micro_batches(rollouts, advantages[learned].tolist())
            with self._timed(seconds, "training"):
                update = self.updater.update(batches)
        self.steps += 1
        if self.draft is not None:
            with self._timed(seconds, "draft"):
                self.draft.train()
        with self._timed(seconds, "sync"):
            self.engine.update_weights(merged_weights(self.policy))
        return StepReport(
            step=self.steps,
            version=version,
            seconds=seconds,
            rewards=tuple(None if reward.failed else reward.value for reward in rewards),
            errors=tuple(reward.error for reward in rewards if reward.failed),
            **update._asdict(),
            speculation=Speculation.of(batch.rollouts),
            overlap=self._overlap(batch),
            by_version=by_version(batch.rollouts),
            by_draft_age=by_draft_age(batch.rollouts),
            by_phase=by_phase(batch.rollouts),
            regimes=batch.regimes,
            draft_rolled_back=rolled_back,
        )

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of policy, optimizer and step. An existing one stays intact if this fails.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "version": self.engine.version,
            "settings": asdict(self.settings),
            "draft": None if self.draft is None else self.draft.state_dict(),
            "answers": {group: list(map(array.tolist, answers)) for group, answers in self._answers.items()},
        }
        write_checkpoint(folder, state)

    def restore(self, folder: str | Path) -> None:
        """Go on from a checkpoint, with the tokens that the run would have sampled without the interruption.

        Raises:
            OutriderError: there is no checkpoint, it is damaged, or it has other settings.
        """
        state = read_checkpoint(folder, asdict(self.settings))
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.draft is not None and state["draft"] is not None:
            self.draft.load_state_dict(state["draft"])
        answers = state.get("answers", {})  # older checkpoints have none; their problems then count as not seen
        self._answers = {group: _arrays(given) for group, given in answers.items()}
        self.steps = state["steps"]
        self.engine.update_weights(merged_weights(self.policy), max(state["version"], self.engine.version + 1))

    def _overlap(self, batch: RolloutBatch) -> Overlap:
        """Compare rollouts with the previous answers to their problems, and keep them for the next pass."""
        groups = {}
        for group in batch.groups():
            groups[group[0].group] = _arrays(each.token_ids for each in group if not each.error)
        overlap = Overlap.of(groups, self._answers)
        self._answers |= groups  # 4 bytes per token
        return overlap

    @contextmanager
    def _timed(self, seconds: StepSeconds, part: str) -> Iterator[None]:
        """Add the time of a block to a part of the step."""
        began = self.clock()
        yield
        setattr(seconds, part, getattr(seconds, part) + self.clock() - began)


def _arrays(answers: Iterable[Iterable[int]]) -> list[array[int]]:
    return [array("i", answer) for answer in answers]
