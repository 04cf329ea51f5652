"""Several processes that train one draft: torchrun begins them, and what they must agree on goes through here."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed

# The first process alone measures tau and writes, and the others wait for it in their next sum: as long as that takes,
# where torch's own 10 to 30 minutes would end the training. Should one die, torchrun ends the others without this.
_PATIENCE = timedelta(days=1)


def rank() -> int:
    """Which process this is, counted from 0."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_of(name: str) -> str:
    """The device of this process: where several share a machine's GPUs, each has its own."""
    if world() > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def meet(device: torch.device) -> None:
    """Join the others, if there are any."""
    if world() == 1 or distributed.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)


def part() -> None:
    """Leave the others, who may have work to do still."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in place."""
    if world() > 1:
        distributed.all_reduce(values)
    return values
