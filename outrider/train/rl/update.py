"""The updates of a policy on the rollouts of one step of GRPO."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.errors import OutriderError
from outrider.train.rl.answers import Answers, answer_logprobs, split_answers
from outrider.train.rl.draft_training import DraftTraining
from outrider.train.rl.objective import clipped_objective, importance_weights, kl_estimate
from outrider.train.rl.records import Rollout
from outrider.train.rl.settings import GRPOSettings


@dataclass(slots=True)
class MicroBatch:
    """Answers of one forward pass, with the log-probabilities [B, A] that are the same in all updates of a step."""

    answers: Answers
    reference: torch.Tensor | None  # under the reference model; None: no KL penalty
    old: torch.Tensor | None = None  # under the policy before the updates, from the first pass

    @property
    def logprob_error(self) -> float:
        """The largest difference between the log-probabilities of engine and trainer."""
        return 0.0 if self.old is None else float((self.old - self.answers.sampled_logprobs).abs().max())


class UpdateFigures(NamedTuple):
    """The figures of the updates of a step."""

    loss: float = 0.0
    kl: float = 0.0  # estimate of the divergence from the reference model
    grad_norm: float = 0.0
    logprob_error: float = 0.0  # largest difference between the log-probabilities of engine and trainer


class PolicyUpdater:
    """Has the optimizer of a policy, and its first version as the reference model of the KL penalty."""

    def __init__(
        self, policy: Any, settings: GRPOSettings, *, share_prompts: bool, draft: DraftTraining | None
    ) -> None:
        """Prepare the updates.

        Args:
            policy: a causal language model of transformers in evaluation mode, so that all passes over a token agree.
            settings: the settings of the run.
            share_prompts: as of `answer_logprobs`.
            draft: records the passes of the first update.
        """
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0, fused=True)
        self._policy = policy
        self._settings = settings
        self._share_prompts = share_prompts
        self._draft = draft
        self.reference = deepcopy(policy).requires_grad_(False) if settings.beta else None

    def micro_batches(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[MicroBatch]:
        """Split rollouts, and compute their log-probabilities under the reference model, if there is one."""
        device = next(self._policy.parameters()).device
        parts = split_answers(rollouts, advantages, self._settings.micro_batch, device)
        return [MicroBatch(part, self._reference_logprobs(part)) for part in parts]

    def update(self, batches: Sequence[MicroBatch]) -> UpdateFigures:
        """Update the policy as often as the settings say. Return the figures of the last update.

        Raises:
            OutriderError: the gradient is not finite.
        """
        settings = self._settings
        tokens = sum(len(rollout.token_ids) for batch in batches for rollout in batch.answers.rollouts)
        loss, kl, norm = 0.0, 0.0, 0.0
        for _ in range(settings.updates):
            self.optimizer.zero_grad()
            loss, kl = 0.0, 0.0
            for batch in batches:
                batch_loss, batch_kl = self._backward(batch, tokens)
                loss += batch_loss
                kl += batch_kl
            norm = float(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), settings.max_grad_norm))
            if not math.isfinite(norm):
                raise OutriderError("the gradient is not finite; lower lr")
            self.optimizer.step()
        return UpdateFigures(loss, kl, norm, max(batch.logprob_error for batch in batches))

    def _backward(self, batch: MicroBatch, tokens: int) -> tuple[float, float]:
        """Add the gradient of a batch. Return its loss and KL estimate, divided by `tokens`."""
        settings = self._settings
        answers = batch.answers
        # No weight changes before all passes of the first update are done, so they are passes of the old policy.
        if batch.old is None:
            recording = nullcontext() if self._draft is None else self._draft.recording(self._policy, answers.rollouts)
            with recording:
                new = self._logprobs(self._policy, answers)
            batch.old = new.detach()
        else:
            new = self._logprobs(self._policy, answers)
        objective = clipped_objective(new, batch.old, answers.advantages, settings.clip)
        if settings.importance_cap is not None:
            objective = objective * importance_weights(batch.old, answers.sampled_logprobs, settings.importance_cap)
        loss = objective[answers.mask].sum()
        kl = 0.0
        if batch.reference is not None:
            divergence = kl_estimate(new, batch.reference)[answers.mask].sum()
            loss = loss + settings.beta * divergence
            kl = float(divergence.detach()) / tokens
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) / tokens, kl

    def _logprobs(self, model: Any, answers: Answers) -> torch.Tensor:
        return answer_logprobs(model, answers, temperature=self._settings.temperature, share_prompt=self._share_prompts)

    @torch.no_grad()
    def _reference_logprobs(self, answers: Answers) -> torch.Tensor | None:
        return None if self.reference is None else self._logprobs(self.reference, answers)
