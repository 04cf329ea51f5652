"""A small GRPO loop over torch (Shao et al. 2024, DeepSeekMath).

For each problem the policy samples a group of answers. The advantage of an answer is its reward minus the mean of its
group, divided by the standard deviation of the group. The loss is PPO's clipped objective over the tokens of all
answers, plus a KL penalty against the first policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.rl.answers import Answers, answer_logprobs, split_answers
from outrider.rl.checkpoint import read_checkpoint, write_checkpoint
from outrider.rl.draft_training import DraftTraining
from outrider.rl.objective import clipped_objective, down_sample, group_advantages, importance_weights, kl_estimate
from outrider.rl.peft import merged_weights
from outrider.rl.records import Rollout
from outrider.rl.report import Speculation, StepReport, StepSeconds, by_draft_age, by_phase, by_version
from outrider.rl.rewards import Problem, RewardFunction, compute_rewards
from outrider.rl.rollout import RolloutEngine
from outrider.rl.settings import GRPOSettings


@dataclass(slots=True)
class _Batch:
    """Answers of one forward pass, with the log-probabilities [B, A] that are the same in all updates of a step."""

    answers: Answers
    reference: torch.Tensor | None  # under the reference model; None: no KL penalty
    old: torch.Tensor | None = None  # under the policy before the updates, from the first pass

    @property
    def logprob_error(self) -> float:
        """The largest difference between the log-probabilities of engine and trainer."""
        return 0.0 if self.old is None else float((self.old - self.answers.sampled_logprobs).abs().max())


class _Update(NamedTuple):
    """The figures of the updates of a step."""

    loss: float = 0.0
    kl: float = 0.0  # estimate of the divergence from the reference model
    grad_norm: float = 0.0
    logprob_error: float = 0.0  # largest difference between the log-probabilities of engine and trainer


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
            policy: a trainable causal language model of transformers, also one with a LoRA adapter of PEFT. The engine gets
                its weights at once.
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
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.settings.lr, weight_decay=0.0, fused=True)
        self._reference = deepcopy(policy).requires_grad_(False) if self.settings.beta else None
        self._shares_prompts = not engine.llm.parts.loaded.checkpoint.recurrent
        self.engine.update_weights(merged_weights(policy))

    def train(
        self, problems: Sequence[Problem], steps: int, *, checkpoint: str | Path | None = None, every: int = 1
    ) -> Iterator[StepReport]:
        """Run steps until `steps` are finished, with those of a restored checkpoint. Yield the report of each.

        `checkpoint` is a folder that gets a checkpoint after every `every` steps.

        Raises:
            OutriderError: there are no problems, `every` is below 1, or a checkpoint cannot be written.
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
        with _timed(seconds, "generation"):
            batch = self.engine.generate(
                [problem.prompt for problem in problems],
                params,
                n=settings.samples,
                seed=derive_seed(settings.seed, 1 + self.steps),
            )
        rolled_back = self.draft is not None and self.draft.judge(batch.stats)
        with _timed(seconds, "reward"):
            pairs = [(rollout, problems[rollout.prompt]) for rollout in batch.rollouts]
            rewards = compute_rewards(self.reward, pairs, timeout=settings.reward_timeout)
        values = torch.tensor([reward.value for reward in rewards], dtype=torch.float64).view(len(problems), -1)
        if settings.trained_samples is not None:
            values = down_sample(values, settings.trained_samples)
        advantages = group_advantages(values, scale=settings.scale_rewards).flatten()
        used = (~values.isnan()).flatten().tolist()
        # Without a KL penalty, an answer as good as the mean of its group has no gradient.
        learned = [b for b in range(len(rewards)) if used[b] and (settings.beta or advantages[b] != 0)]
        update = self._update([batch.rollouts[b] for b in learned], advantages[learned].tolist(), seconds)
        self.steps += 1
        if self.draft is not None:
            with _timed(seconds, "draft"):
                self.draft.train()
        with _timed(seconds, "sync"):
            self.engine.update_weights(merged_weights(self.policy))
        return StepReport(
            step=self.steps,
            version=version,
            seconds=seconds,
            rewards=tuple(None if reward.failed else reward.value for reward in rewards),
            errors=tuple(reward.error for reward in rewards if reward.failed),
            loss=update.loss,
            kl=update.kl,
            grad_norm=update.grad_norm,
            logprob_error=update.logprob_error,
            speculation=Speculation.of(batch.rollouts),
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
        self.steps = state["steps"]
        self.engine.update_weights(merged_weights(self.policy), max(state["version"], self.engine.version + 1))

    def _update(self, rollouts: Sequence[Rollout], advantages: Sequence[float], seconds: StepSeconds) -> _Update:
        """Update the policy on rollouts.

        Raises:
            OutriderError: the gradient is not finite.
        """
        if not rollouts:
            return _Update()
        settings = self.settings
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        device = next(self.policy.parameters()).device
        parts = split_answers(rollouts, advantages, settings.micro_batch, device)
        with _timed(seconds, "reference"):
            batches = [_Batch(part, self._reference_logprobs(part)) for part in parts]
        loss, kl, norm = 0.0, 0.0, 0.0
        with _timed(seconds, "training"):
            for _ in range(settings.updates):
                self.optimizer.zero_grad()
                loss, kl = 0.0, 0.0
                for batch in batches:
                    batch_loss, batch_kl = self._backward(batch, tokens)
                    loss += batch_loss
                    kl += batch_kl
                norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm))
                if not math.isfinite(norm):
                    raise OutriderError(f"the gradient of step {self.steps + 1} is not finite; lower lr")
                self.optimizer.step()
        return _Update(loss, kl, norm, max(batch.logprob_error for batch in batches))

    def _backward(self, batch: _Batch, tokens: int) -> tuple[float, float]:
        """Add the gradient of a batch. Return its loss and KL estimate, each divided by `tokens`."""
        settings = self.settings
        answers = batch.answers
        # The weights do not change before the first update is complete, so its passes are those of the old policy.
        if batch.old is None:
            recording = nullcontext() if self.draft is None else self.draft.recording(self.policy, answers.rollouts)
            with recording:
                new = self._logprobs(self.policy, answers)
            batch.old = new.detach()
        else:
            new = self._logprobs(self.policy, answers)
        objective = clipped_objective(new, batch.old, answers.advantages, settings.clip)
        if settings.importance_cap is not None:
            weights = importance_weights(batch.old, answers.sampled_logprobs, settings.importance_cap)
            objective = objective * weights
        loss = objective[answers.mask].sum()
        kl = 0.0
        if batch.reference is not None:
            divergence = kl_estimate(new, batch.reference)[answers.mask].sum()
            loss = loss + settings.beta * divergence
            kl = float(divergence.detach()) / tokens
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) / tokens, kl

    def _logprobs(self, model: Any, answers: Answers) -> torch.Tensor:
        return answer_logprobs(
            model, answers, temperature=self.settings.temperature, share_prompt=self._shares_prompts
        )

    @torch.no_grad()
    def _reference_logprobs(self, answers: Answers) -> torch.Tensor | None:
        return None if self._reference is None else self._logprobs(self._reference, answers)


@contextmanager
def _timed(seconds: StepSeconds, part: str) -> Iterator[None]:
    """Add the time of a block to a part of the step."""
    began = perf_counter()
    yield
    setattr(seconds, part, getattr(seconds, part) + perf_counter() - began)
