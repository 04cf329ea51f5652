"""Runs training steps, and saves and loads the state of a training."""

import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from outrider.errors import OutriderError
from outrider.models.heads.files import replace_tensors
from outrider.runtime.processes import world_size
from outrider.train.distributed import all_reduce_sum
from outrider.train.loss.chunked import chunked_loss
from outrider.train.loss.losses import LENGTH, length_loss
from outrider.train.loss.steps import TrainingBatch
from outrider.train.model.trainee import DraftTrainee
from outrider.train.optimizer import Optimizer
from outrider.train.precision import matmul_dtype

STATE = "state.pt"
_STATE_KEYS = frozenset({"module", "optimizer", "step", "random", "identity", "cycle"})
_ALPHA_EVERY = 4  # steps between two records of alpha; to read alpha takes as long as the loss itself
_WARMUP = 0.03  # share of the training in which the learning rate rises
_FINAL_LR = 0.05  # learning rate at the end, as a share of its peak


@dataclass(slots=True)
class StepStats:
    """Statistics of one training step, over all of its micro-batches."""

    loss: float = 0.0  # mean per column
    columns: float = 0.0  # columns whose first draft token is trained
    alpha_sums: list[float] = field(default_factory=list)  # sum of alpha, by position of the draft token
    alpha_counts: list[float] = field(default_factory=list)  # number of values in this sum, by position

    def add_alpha(self, position: int, alpha: torch.Tensor) -> None:
        """Add the acceptance probabilities [n] of draft tokens at a position."""
        while len(self.alpha_counts) <= position:
            self.alpha_sums.append(0.0)
            self.alpha_counts.append(0.0)
        self.alpha_sums[position] += float(alpha.sum())
        self.alpha_counts[position] += len(alpha)

    @property
    def acceptance(self) -> list[float]:
        """Mean alpha by position of the draft token, with teacher forcing."""
        pairs = zip(self.alpha_sums, self.alpha_counts, strict=True)
        return [alpha_sum / count if count else 0.0 for alpha_sum, count in pairs]


class Trainer:
    """Trains a draft step by step.

    The loss of a step is the sum over all columns, divided by the number of columns in all micro-batches of all
    processes. So the division into micro-batches and processes changes the result only by rounding.
    """

    def __init__(self, trainee: DraftTrainee, *, losses: dict[str, float], steps: int, decay: float, lr: float) -> None:
        """Create the optimizer.

        Args:
            trainee: the draft to train.
            losses: weights of the losses by name.
            steps: draft tokens that training unrolls.
            decay: factor of the loss from one draft token to the next.
            lr: peak learning rate.
        """
        self.trainee = trainee
        self.optimizer = Optimizer(trainee.module, lr=lr, vocab=len(trainee.ids))
        self.step = 0
        self._losses = losses
        # The length loss is that of the chain that is drafted. Other predictions then have the cross-entropy.
        self._auxiliary_losses = {name: losses[name] for name in losses if name != LENGTH} or {"ce": 1.0}
        self._steps = steps
        self._decay = decay
        self._lr = lr
        self._device = next(trainee.module.parameters()).device
        self._mixed_precision = matmul_dtype(self._device) is torch.bfloat16  # weights are float32

    def train(self, micro_batches: Iterable[TrainingBatch], *, progress: float) -> StepStats:
        """Make one step on all micro-batches. `progress` is the share of the training that is done.

        Raises:
            OutriderError: the loss or the gradient is not finite. No weight has changed.
        """
        stats = StepStats()
        module = self.trainee.module
        module.train()
        for batch in micro_batches:
            if not bool(batch.loss_mask.any()):
                continue
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed_precision):
                loss = self._loss(batch, stats)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            stats.loss += float(loss.detach())
        self._reduce(stats)
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        if not math.isfinite(stats.loss) or not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise OutriderError(
                f"the loss at step {self.step} is {stats.loss} and the norm of its gradient is"
                f" {norm}; use a smaller --lr"
            )
        if stats.columns:
            self.optimizer.step(self._lr * lr_factor(progress))
        self.optimizer.zero_grad()
        self.step += 1
        return stats

    def _loss(self, batch: TrainingBatch, stats: StepStats) -> torch.Tensor:
        """Return the loss of a micro-batch, summed over its columns."""
        loss = torch.zeros((), device=self._device)
        extra_loss = torch.zeros((), device=self._device)
        alphas: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        weights: list[float] = []
        for position, step in enumerate(self.trainee.unroll(batch, self._steps)):
            weight = step.weight * self._decay**position
            losses, alpha = chunked_loss(step.logits, step.target, self._losses)
            loss = loss + weight * losses.sum()
            for share, logits in step.auxiliary:
                loss = loss + weight * share * chunked_loss(logits, step.target, self._auxiliary_losses)[0].sum()
            if step.confidence is not None:
                # The confidence head always has this loss, whatever `--loss` is (DSpark).
                loss = loss + weight * functional.binary_cross_entropy_with_logits(
                    step.confidence, alpha.detach().clamp(0, 1), reduction="sum"
                )
            if step.extra_loss is not None:
                extra_loss = extra_loss + step.extra_loss
            if position == 0:
                stats.columns += float(step.loss_mask.sum())
            if LENGTH in self._losses:
                alphas.append(
                    torch.zeros(step.loss_mask.shape, device=self._device).masked_scatter(step.loss_mask, alpha)
                )
                masks.append(step.loss_mask)
                weights.append(step.weight)
            if self.step % _ALPHA_EVERY == 0:
                stats.add_alpha(position, alpha.detach())
        total_weight = sum(self._decay**position for position in range(self._steps))
        loss = loss / total_weight + extra_loss
        return loss + self._losses[LENGTH] * _total_length_loss(alphas, masks, weights) if alphas else loss

    def _reduce(self, stats: StepStats) -> None:
        """Sum loss and gradients over all processes, and divide them by the number of columns."""
        sums = torch.tensor([stats.loss, stats.columns], dtype=torch.float32, device=self._device)
        loss, columns = all_reduce_sum(sums).tolist()
        stats.loss = loss / max(columns, 1.0)
        stats.columns = columns
        for weight in self.trainee.module.parameters():
            if weight.grad is None and world_size() > 1:  # another process may have a gradient for it
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                all_reduce_sum(weight.grad)
                weight.grad /= max(columns, 1.0)

    def save(self, folder: Path, **extra: Any) -> None:
        """Write the state of the training and `extra`. If this fails, the state that was saved before is intact.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """
        state = {
            "module": self.trainee.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
            **extra,
        }
        try:
            replace_tensors(state, folder / STATE)
        except (OSError, RuntimeError) as error:
            raise OutriderError(
                f"{folder / STATE} cannot be written ({error}); the state that was saved before is"
                " intact. Free some space and run the same command again"
            ) from error

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that `save` has written."""
        self.trainee.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"].cpu())


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of the training in a folder, or None if there is none.

    Raises:
        OutriderError: the file cannot be read, or it is not the state of a training.
    """
    file = folder / STATE
    if not file.is_file():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise OutriderError(f"{file} cannot be read ({reason}); use --overwrite, or another --out") from error
    if not isinstance(state, dict) or not state.keys() >= _STATE_KEYS:
        raise OutriderError(f"{file} is not the state of a training; use --overwrite, or another --out")
    return state


def lr_factor(progress: float) -> float:
    """Return the learning rate as a share of its peak: a linear warm-up, then a cosine decay.

    `progress` is the share of the training that is done.
    """
    if progress < _WARMUP:
        return (progress + 1e-3) / (_WARMUP + 1e-3)
    decay = (progress - _WARMUP) / (1 - _WARMUP)
    return _FINAL_LR + (1 - _FINAL_LR) * (1 + math.cos(math.pi * min(decay, 1.0))) / 2


def _total_length_loss(alphas: list[torch.Tensor], masks: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Return the length loss, summed over all columns.

    Args:
        alphas: by position of the draft token, its acceptance probabilities [B, C]. Later positions have fewer columns.
        masks: by position, which columns [B, C] have this draft token.
        weights: by position, the weight of a column.
    """
    size = masks[0].shape[1]
    padded_alphas = [functional.pad(alpha, (0, size - alpha.shape[1])) for alpha in alphas]
    padded_masks = [functional.pad(mask, (0, size - mask.shape[1])) for mask in masks]
    exists = torch.stack(padded_masks).cumprod(0).bool()
    return length_loss(torch.stack(padded_alphas), exists, weights).sum()
