"""The processes that torchrun starts."""

import os
import shlex
import sys
from pathlib import Path

import torch


def rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(name: str) -> str:
    """Return the device of this process. Several processes on a machine use one GPU each."""
    if world_size() > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def torchrun_command(processes: int) -> str:
    """Return the command that starts this program with torchrun in this number of processes."""
    program, *arguments = sys.argv
    # `outrider` and `python -m outrider` are both started as a module.
    is_module = Path(program).name in ("outrider", "__main__.py")
    started = ["-m", "outrider"] if is_module else [program]
    return shlex.join(["torchrun", "--nproc-per-node", str(processes), *started, *arguments])
