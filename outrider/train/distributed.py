"""Distributed data-parallel training: the processes of torchrun or Ray Train, and their collective operations."""

from datetime import timedelta

import torch
from torch import distributed

from outrider.runtime.processes import world_size

# Only the process of rank 0 evaluates the draft and writes files. The others wait for it in their
# next all-reduce, which can take longer than torch's default timeout of 10 to 30 minutes. If a
# process dies, torchrun or Ray Train ends the others.
TIMEOUT = timedelta(days=1)


def join_group(device: torch.device) -> bool:
    """Join the process group, if there are several processes and Ray Train has not made it.

    Returns:
        Whether this process has joined it, and must leave it at the end.
    """
    if world_size() == 1 or distributed.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return True


def leave_group() -> None:
    """Leave the process group. The other processes may still be working."""
    distributed.destroy_process_group()


def all_reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` over all processes in place, and return them."""
    if world_size() > 1:
        distributed.all_reduce(values)
    return values
