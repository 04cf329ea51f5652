"""Steps of training, and everything that must survive a kill."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from outrider.errors import OutriderError
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent
from outrider.train.losses import LENGTH, LOSSES, Laws, shortfall
from outrider.train.unroll import Texts, unrolled

STATE = "state.pt"
_WATCH = 4  # steps between looks at what is kept, which takes as long as the loss itself
_WARM, _LAST = 0.03, 0.05  # share of the run in which the rate rises; what is left of it at the end


@dataclass(slots=True)
class Sums:
    """What a step has seen, summed over its parts."""

    loss: float = 0.0
    columns: float = 0.0
    alpha: list[float] = field(default_factory=list)  # by position
    met: list[float] = field(default_factory=list)

    def see(self, position: int, alpha: torch.Tensor, learn: torch.Tensor) -> None:
        while len(self.met) <= position:
            self.alpha.append(0.0)
            self.met.append(0.0)
        self.alpha[position] += float((alpha * learn).sum())
        self.met[position] += float(learn.sum())

    @property
    def acceptance(self) -> list[float]:
        """Mean alpha of each guess in a row, teacher forced."""
        return [a / m if m else 0.0 for a, m in zip(self.alpha, self.met, strict=True)]


class Trainer:
    """A module, its optimiser, and how far it has come."""

    def __init__(
        self, module: Follower | Independent, *, losses: dict[str, float], steps: int, decay: float, lr: float
    ) -> None:
        self.module, self.step = module, 0
        self._losses, self._steps, self._decay, self._lr = losses, steps, decay, lr
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
        self._device = next(module.parameters()).device

    def train(self, parts: Sequence[Texts], *, progress: float) -> Sums:
        """One step over all parts; `progress` says which share of the run lies behind."""
        sums = Sums()
        total = sum(float(texts.learn.sum()) for texts in parts)
        self.module.train()
        for texts in parts:
            if not bool(texts.learn.any()):
                continue
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = self._loss(texts, sums)
            share = float(texts.learn.sum()) / total
            (loss * share).backward()  # type: ignore[no-untyped-call]
            sums.loss += float(loss.detach()) * share
        sums.columns = total
        if not math.isfinite(sums.loss):
            raise OutriderError(f"the loss is {sums.loss} at step {self.step}; use a smaller --lr")
        _average(self.module)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = self._lr * rate(progress)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return sums

    def _loss(self, texts: Texts, sums: Sums) -> torch.Tensor:
        total, weights = torch.zeros((), device=self._device), 0.0
        alphas: list[torch.Tensor] = []
        heres: list[torch.Tensor] = []
        for position, step in enumerate(unrolled(self.module, texts, self._steps)):
            learn, count = step.learn, step.learn.sum().clamp(min=1)
            laws = Laws(step.target, step.logits.float().log_softmax(-1))
            weight = self._decay**position
            for name, share in self._losses.items():
                if name != LENGTH:
                    total = total + weight * share * (LOSSES[name](laws) * learn).sum() / count
            weights += weight
            if LENGTH in self._losses:
                rest = (0, texts.learn.shape[1] - 1 - learn.shape[1])
                alphas.append(nn.functional.pad(laws.alpha, rest))
                heres.append(nn.functional.pad(learn, rest))
            if self.step % _WATCH == 0:
                with torch.no_grad():
                    sums.see(position, laws.alpha, learn)
        if LENGTH in self._losses:
            here = torch.stack(heres).cumprod(0).bool()
            total = total + weights * self._losses[LENGTH] * shortfall(torch.stack(alphas), here)
        return total / max(weights, 1e-9)

    def save(self, folder: Path, **facts: Any) -> None:
        """Write all that it takes to go on; what was saved before survives a failure."""
        state = {
            "module": self.module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
            **facts,
        }
        fresh = folder / f"{STATE}.new"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, fresh)
            fresh.replace(folder / STATE)
        except (OSError, RuntimeError) as error:
            fresh.unlink(missing_ok=True)
            raise OutriderError(
                f"{folder / STATE} cannot be written ({error}); what was saved before is whole. Free some space and"
                " run the same command again"
            ) from error

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote."""
        self.module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        torch.set_rng_state(state["random"].cpu())


def read_state(folder: Path) -> dict[str, Any] | None:
    """What a training before has saved, if anything.

    Raises:
        OutriderError: it cannot be read.
    """
    file = folder / STATE
    if not file.is_file():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise OutriderError(f"{file} cannot be read ({error}); remove it, or train into another folder") from error


def rate(progress: float) -> float:
    """The learning rate's share of its height: it rises, and falls again as a cosine does."""
    if progress < _WARM:
        return (progress + 1e-3) / (_WARM + 1e-3)
    fall = (progress - _WARM) / (1 - _WARM)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * min(fall, 1.0))) / 2


def rank() -> tuple[int, int]:
    """Which process this is, and of how many: torchrun says so."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def meet(device: torch.device) -> None:
    """Join the other processes that torchrun has begun, if any."""
    if rank()[1] > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def _average(module: nn.Module) -> None:
    """Gradients of all processes."""
    if rank()[1] == 1:
        return
    for weight in module.parameters():
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        distributed.all_reduce(weight.grad)
        weight.grad /= rank()[1]


def mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some) if some else 0.0
