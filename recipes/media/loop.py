"""Trains a module for a number of steps. An interrupted training continues where it was saved."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.train.optimizer import Optimizer
from recipes.family.train import lr_factor, say

SAVE_EVERY = 50  # steps
_SAY_EVERY = 50  # steps


def train(
    module: nn.Module, loss: Callable[[torch.Generator], Tensor], *, steps: int, lr: float, file: Path, seed: int
) -> None:
    """Train a module in place.

    Args:
        module: what to train. If `file` holds its finished weights, they are loaded and nothing is trained.
        loss: returns the loss of a new batch. It takes all its random numbers from the generator that it is given,
            which depends on the seed and the step, so an interrupted training gives the same weights.
        steps: how many.
        lr: peak learning rate.
        file: where weights and the state of the optimizer are saved.
        seed: of the batches.
    """
    optimizer = Optimizer(module, lr=lr, vocab=-1)
    begin = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    module.train()
    total = 0.0
    for step in range(begin, steps):
        value = loss(torch.Generator().manual_seed(seed * 1_000_003 + step))
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step(lr * lr_factor(step / steps))
        optimizer.zero_grad()
        total += float(value.detach())
        if (step + 1) % _SAY_EVERY == 0:
            say(f"{file.stem}: step {step + 1} of {steps}, loss {total / _SAY_EVERY:.4f}")
            total = 0.0
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            _save(file, {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    module.eval()


def _save(file: Path, state: dict[str, object]) -> None:
    part = file.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, file)
