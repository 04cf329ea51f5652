"""Steps of training, and everything that must survive a kill."""

from __future__ import annotations

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
from outrider.heads.files import save_tensors
from outrider.train.distributed import total, world
from outrider.train.loss.chunked import chunked_loss
from outrider.train.loss.losses import LENGTH, shortfall
from outrider.train.loss.steps import Texts
from outrider.train.model.trainee import DraftTrainee
from outrider.train.optimizer import Optimizer
from outrider.train.precision import products

STATE = "state.pt"
_WATCH = 4  # steps between looks at what is kept, which takes as long as the loss itself
_WARM, _LAST = 0.03, 0.05  # share of the run in which the rate rises; what is left of it at the end


@dataclass(slots=True)
class Sums:
    """What a step has seen, over its parts."""

    loss: float = 0.0  # of a column, in the mean
    columns: float = 0.0  # learned from, by the first guess
    alpha: list[float] = field(default_factory=list)  # by position, summed up
    met: list[float] = field(default_factory=list)

    def see(self, position: int, alpha: torch.Tensor) -> None:
        """Note the shares [n] of guesses at a position."""
        while len(self.met) <= position:
            self.alpha.append(0.0)
            self.met.append(0.0)
        self.alpha[position] += float(alpha.sum())
        self.met[position] += len(alpha)

    @property
    def acceptance(self) -> list[float]:
        """Mean alpha of each guess in a row, teacher forced."""
        return [a / m if m else 0.0 for a, m in zip(self.alpha, self.met, strict=True)]


class Trainer:
    """A pupil, its optimiser, and how far it has come.

    The loss is a sum over columns divided by their number in the whole step, in all parts and all processes: how texts
    are cut into parts, and shared among processes, changes nothing but rounding.
    """

    def __init__(self, pupil: DraftTrainee, *, losses: dict[str, float], steps: int, decay: float, lr: float) -> None:
        self.pupil, self.step = pupil, 0
        self._losses, self._steps, self._decay, self._lr = losses, steps, decay, lr
        self._optimiser = Optimizer(pupil.module, lr=lr, vocab=len(pupil.ids))
        self._device = next(pupil.module.parameters()).device
        self._mixed = products(self._device) is torch.bfloat16  # with weights in float32

    def train(self, parts: Iterable[Texts], *, progress: float) -> Sums:
        """One step over all parts; `progress` says which share of the run lies behind.

        Raises:
            OutriderError: the loss or its slope is not a number; no weight has changed.
        """
        sums, module = Sums(), self.pupil.module
        module.train()
        for texts in parts:
            if not bool(texts.learn.any()):
                continue
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
                loss = self._loss(texts, sums)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            sums.loss += float(loss.detach())
        self._gather(sums)
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        if not math.isfinite(sums.loss) or not math.isfinite(norm):
            self._optimiser.forget()
            raise OutriderError(
                f"at step {self.step} the loss is {sums.loss} and the norm of its slope {norm}; use a smaller --lr"
            )
        if sums.columns:
            self._optimiser.step(self._lr * rate(progress))
        self._optimiser.forget()
        self.step += 1
        return sums

    def _loss(self, texts: Texts, sums: Sums) -> torch.Tensor:
        """The sum over columns."""
        lost, beside = torch.zeros((), device=self._device), torch.zeros((), device=self._device)
        alphas: list[torch.Tensor] = []
        heres: list[torch.Tensor] = []
        shares: list[float] = []
        for position, step in enumerate(self.pupil.unroll(texts, self._steps)):
            learn, weight = step.learn, step.weight * self._decay**position
            losses, alpha = chunked_loss(step.logits, step.target, self._losses)
            lost = lost + weight * losses.sum()
            if step.confidence is not None:  # beside what is asked for: it judges, and guesses nothing (DSpark)
                lost = lost + weight * functional.binary_cross_entropy_with_logits(
                    step.confidence, alpha.detach().clamp(0, 1), reduction="sum"
                )
            if step.beside is not None:
                beside = beside + step.beside
            sums.columns += 0 if position else float(learn.sum())
            if LENGTH in self._losses:
                alphas.append(torch.zeros(learn.shape, device=self._device).masked_scatter(learn, alpha))
                heres.append(learn)
                shares.append(step.weight)
            if self.step % _WATCH == 0:
                sums.see(position, alpha.detach())
        weights = sum(self._decay**position for position in range(self._steps))
        lost = lost / weights + beside
        return lost + self._losses[LENGTH] * _shortfall(alphas, heres, shares) if alphas else lost

    def _gather(self, sums: Sums) -> None:
        """Make of sums over columns means over those of all processes."""
        both = total(torch.tensor([sums.loss, sums.columns], dtype=torch.float32, device=self._device)).tolist()
        sums.loss, sums.columns = both[0] / max(both[1], 1.0), both[1]
        for weight in self.pupil.module.parameters():
            if weight.grad is None and world() > 1:  # another process may have a slope for it
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                total(weight.grad)
                weight.grad /= max(both[1], 1.0)

    def save(self, folder: Path, **facts: Any) -> None:
        """Write all that it takes to go on; what was saved before survives a failure.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """
        state = {
            "module": self.pupil.module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
            **facts,
        }
        fresh = folder / f"{STATE}.new"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(state, fresh)
            fresh.replace(folder / STATE)
        except (OSError, RuntimeError) as error:
            fresh.unlink(missing_ok=True)
            raise OutriderError(
                f"{folder / STATE} cannot be written ({error}); what was saved before is whole. Free some space and"
                " run the same command again"
            ) from error

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote."""
        self.pupil.module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        torch.set_rng_state(state["random"].cpu())


def read_state(folder: Path) -> dict[str, Any] | None:
    """What a training before has saved, if anything.

    Raises:
        OutriderError: it cannot be read, or is something else.
    """
    file = folder / STATE
    if not file.is_file():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise OutriderError(f"{file} cannot be read ({reason}); use --overwrite, or another --out") from error
    if not isinstance(state, dict) or not {"module", "optimiser", "step", "random", "identity", "wave"} <= state.keys():
        raise OutriderError(f"{file} is no state of a training; use --overwrite, or another --out")
    return state


def rate(progress: float) -> float:
    """The learning rate's share of its height: it rises, and falls again as a cosine does."""
    if progress < _WARM:
        return (progress + 1e-3) / (_WARM + 1e-3)
    fall = (progress - _WARM) / (1 - _WARM)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * min(fall, 1.0))) / 2


def _shortfall(alphas: list[torch.Tensor], learn: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Summed over chains, from what is known [B, C] of each guess in a row; later ones reach fewer columns."""
    size = learn[0].shape[1]
    wide = [functional.pad(alpha, (0, size - alpha.shape[1])) for alpha in alphas]
    here = [functional.pad(each, (0, size - each.shape[1])) for each in learn]
    return shortfall(torch.stack(wide), torch.stack(here).cumprod(0).bool(), weights).sum()
