"""A small GRPO loop over torch (Shao et al. 2024, DeepSeekMath).

For each problem the policy samples a group of answers. The advantage of an answer is its reward minus the mean of its
group, divided by the standard deviation of the group. The loss is PPO's clipped objective over the tokens of all
answers, plus a KL penalty against the first policy.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.heads.files import save_tensors
from outrider.rl.draft_training import DraftTraining
from outrider.rl.records import Rollout, RolloutTensors, rollout_tensors
from outrider.rl.report import Speculation, StepReport, StepSeconds, by_draft_age, by_phase, by_version
from outrider.rl.rewards import Problem, RewardFunction, compute_rewards
from outrider.rl.rollout import RolloutEngine

_CHECKPOINT = "grpo.pt"
_CHECKPOINT_KEYS = frozenset({"policy", "optimizer", "steps", "version", "settings", "draft"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """The settings of a run. All of them are checked when the record is made."""

    problems: int = 4  # per step
    samples: int = 8  # answers to each problem
    trained_samples: int | None = None  # of them, those that the update uses (see `down_sample`); None: all
    temperature: float = 1.0
    max_tokens: int = 128  # of an answer
    updates: int = 1  # optimizer steps on the rollouts of a step
    micro_batch: int = 8  # answers in one forward pass
    lr: float = 1e-6
    clip: float = 0.2  # largest change of the probability ratio that is rewarded
    # Weigh each token by the ratio of its probabilities under the policy and the rollout, at most this (truncated
    # importance sampling). None: no weights, as the rollouts of an exact engine are samples of the policy.
    importance_cap: float | None = None
    beta: float = 0.0  # weight of the KL penalty; 0: none, and no reference model is kept
    max_grad_norm: float = 1.0
    scale_rewards: bool = True  # divide advantages by the standard deviation of the group
    reward_timeout: float | None = None  # seconds; None: no limit
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("problems", "samples", "max_tokens", "updates", "micro_batch"):
            if getattr(self, name) < 1:
                raise OutriderError(f"{name} is {getattr(self, name)}; use a number above 0")
        for name in ("temperature", "lr", "clip", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise OutriderError(f"{name} is {getattr(self, name)}; use a number above 0")
        if self.samples < 2:
            raise OutriderError("samples is 1, and a group of one answer has no advantage; use at least 2")
        if self.trained_samples is not None and not 2 <= self.trained_samples <= self.samples:
            raise OutriderError(
                f"trained_samples is {self.trained_samples}; use 2 to {self.samples}, the number of samples"
            )
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise OutriderError(f"importance_cap is {self.importance_cap}; use a number of at least 1, such as 2")
        if self.beta < 0:
            raise OutriderError(f"beta is {self.beta}; use 0 for no KL penalty, or a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """Rollouts of one forward pass, with the values that are the same in all updates of a step."""

    tensors: RolloutTensors
    advantages: torch.Tensor  # [B]
    old: torch.Tensor  # [B, S] log-probabilities under the policy before the updates
    reference: torch.Tensor | None  # [B, S] log-probabilities under the reference model; None: no KL penalty
    weights: torch.Tensor | None  # [B, S] importance weights; None: all are 1


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
            policy: a trainable causal language model of transformers. The engine gets its weights at once.
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
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=self.settings.lr, weight_decay=0.0)
        self._reference = deepcopy(policy).requires_grad_(False) if self.settings.beta else None
        self.engine.update_weights(self._weights())

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
        update = self._update(batch.rollouts, advantages.float(), learned, seconds)
        self.steps += 1
        if self.draft is not None:
            with _timed(seconds, "draft"):
                self.draft.train()
        with _timed(seconds, "sync"):
            self.engine.update_weights(self._weights())
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

    def logprobs(self, model: Any, tensors: RolloutTensors) -> torch.Tensor:
        """Return the log-probabilities [B, S] of the tokens of completions at the sampling temperature, else 0."""
        device = next(model.parameters()).device
        tokens = tensors.token_ids.to(device)
        out = model(input_ids=tokens, attention_mask=tensors.attention_mask.long().to(device), use_cache=False)
        scaled = out.logits[:, :-1].float() / self.settings.temperature
        chosen = scaled.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(chosen, (1, 0)) * tensors.completion_mask.to(device)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of policy, optimizer and step. An existing one stays intact if this fails.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """
        path = Path(folder).expanduser()
        temporary = path / f"{_CHECKPOINT}.new"
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "version": self.engine.version,
            "settings": asdict(self.settings),
            "draft": None if self.draft is None else self.draft.state_dict(),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            save_tensors(state, temporary)
            temporary.replace(path / _CHECKPOINT)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                temporary.unlink()
            raise OutriderError(
                f"{path / _CHECKPOINT} cannot be written ({error}); free some space, or give another folder"
            ) from error

    def restore(self, folder: str | Path) -> None:
        """Go on from a checkpoint, with the tokens that the run would have sampled without the interruption.

        Raises:
            OutriderError: there is no checkpoint, it is damaged, or it has other settings.
        """
        path = Path(folder).expanduser() / _CHECKPOINT
        if not path.is_file():
            raise OutriderError(f"{path} does not exist; give the folder of a checkpoint, or start a new run")
        state = _read_checkpoint(path)
        own = asdict(self.settings)
        if changed := [name for name, value in own.items() if state["settings"].get(name) != value]:
            name = changed[0]
            raise OutriderError(
                f"{path} was made with {name} {state['settings'].get(name)}, and {name} is {own[name]} now; use the"
                " same settings"
            )
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.draft is not None and state["draft"] is not None:
            self.draft.load_state_dict(state["draft"])
        self.steps = state["steps"]
        self.engine.update_weights(self._weights(), max(state["version"], self.engine.version + 1))

    def _recorded_logprobs(self, tensors: RolloutTensors, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return the log-probabilities under the policy, and let the draft's training record the pass."""
        if self.draft is None:
            return self.logprobs(self.policy, tensors)
        with self.draft.recording(self.policy, rollouts):
            return self.logprobs(self.policy, tensors)

    def _importance(self, logprobs: torch.Tensor, tensors: RolloutTensors) -> torch.Tensor | None:
        """Return the importance weights of tokens [B, S], given their log-probabilities under the policy."""
        cap = self.settings.importance_cap
        if cap is None:
            return None
        return (logprobs - tensors.sampled_logprobs.to(logprobs.device)).exp().clamp(max=cap)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.policy.state_dict().items()}

    def _update(
        self, rollouts: Sequence[Rollout], advantages: torch.Tensor, learned: Sequence[int], seconds: StepSeconds
    ) -> _Update:
        """Update the policy on the rollouts with the indices `learned`.

        Raises:
            OutriderError: the gradient is not finite.
        """
        if not learned:
            return _Update()
        settings = self.settings
        tokens = sum(len(rollouts[b].token_ids) for b in learned)
        groups = [
            list(learned[begin : begin + settings.micro_batch])
            for begin in range(0, len(learned), settings.micro_batch)
        ]
        batches = [
            self._micro_batch([rollouts[b] for b in indices], advantages[indices], seconds) for indices in groups
        ]
        error = max(
            float((batch.old - batch.tensors.sampled_logprobs.to(batch.old.device)).abs().max()) for batch in batches
        )
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
        return _Update(loss, kl, norm, error)

    def _micro_batch(self, rollouts: Sequence[Rollout], advantages: torch.Tensor, seconds: StepSeconds) -> _MicroBatch:
        """Compute the log-probabilities of rollouts under the policy and the reference model."""
        tensors = rollout_tensors(rollouts, pad_token_id=0)
        with _timed(seconds, "logprobs"), torch.no_grad():
            old = self._recorded_logprobs(tensors, rollouts)
            reference = None if self._reference is None else self.logprobs(self._reference, tensors)
        return _MicroBatch(
            tensors=tensors,
            advantages=advantages,
            old=old,
            reference=reference,
            weights=self._importance(old, tensors),
        )

    def _backward(self, batch: _MicroBatch, tokens: int) -> tuple[float, float]:
        """Add the gradient of a micro-batch. Return its loss and KL estimate, each divided by `tokens`."""
        settings = self.settings
        new = self.logprobs(self.policy, batch.tensors)
        mask = batch.tensors.completion_mask.to(new.device)
        objective = clipped_objective(new, batch.old, batch.advantages.to(new.device)[:, None], settings.clip)
        if batch.weights is not None:
            objective = objective * batch.weights
        loss = objective[mask].sum()
        kl = 0.0
        if batch.reference is not None:
            divergence = kl_estimate(new, batch.reference)[mask].sum()
            loss = loss + settings.beta * divergence
            kl = float(divergence.detach()) / tokens
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) / tokens, kl


def _read_checkpoint(file: Path) -> dict[str, Any]:
    """Return the state in a checkpoint.

    Raises:
        OutriderError: the file cannot be read, or it is not a checkpoint of `GRPO`.
    """
    try:
        state = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise OutriderError(f"{file} cannot be read ({reason}); give another checkpoint, or start a new run") from error
    if not isinstance(state, dict) or not state.keys() >= _CHECKPOINT_KEYS:
        raise OutriderError(f"{file} is not a checkpoint of GRPO; give another checkpoint, or start a new run")
    return state


def group_advantages(rewards: torch.Tensor, *, scale: bool = True) -> torch.Tensor:
    """Return the advantages of rewards [groups, samples]. A NaN is a sample without a reward; its advantage is 0."""
    given = ~rewards.isnan()
    count = given.sum(1, keepdim=True).clamp(min=1)
    centered = torch.where(given, rewards - rewards.nansum(1, keepdim=True) / count, 0.0)
    if not scale:
        return centered
    deviation = (centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centered / (deviation + 1e-4)


def down_sample(rewards: torch.Tensor, count: int) -> torch.Tensor:
    """Keep `count` rewards of each group [groups, samples] and replace the others by NaN.

    Of all choices, the kept ones have the largest variance (Xu et al. 2025, "Not All Rollouts are Useful"). Sampling is
    cheap with speculation, and most of a group often teaches nothing new.
    """
    kept = torch.full_like(rewards, torch.nan)
    for group, out in zip(rewards, kept, strict=True):
        order = group.argsort(stable=True)[: int((~group.isnan()).sum())]  # NaN comes last
        if len(order) > count:
            # The largest variance needs the lowest i and the highest count - i rewards, for some i.
            choices = [torch.cat([order[:i], order[len(order) - (count - i) :]]) for i in range(count + 1)]
            order = max(choices, key=lambda choice: float(group[choice].var(correction=0)))
        out[order] = group[order]
    return kept


def clipped_objective(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the loss of PPO by token (Schulman et al. 2017, eq. 7)."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def kl_estimate(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an estimate of KL(new || reference) by token, which is never negative (Schulman 2020, k3)."""
    difference = reference - new
    return difference.exp() - difference - 1


@contextmanager
def _timed(seconds: StepSeconds, part: str) -> Iterator[None]:
    """Add the time of a block to a part of the step."""
    began = perf_counter()
    yield
    setattr(seconds, part, getattr(seconds, part) + perf_counter() - began)
