"""The ranks of tensor parallelism, and the values that they exchange outside of the model.

Every rank runs the same engine over the same requests. Rank 0 provides all times, random numbers and input (`share`),
so all ranks make the same decisions. After each round the ranks compare the emitted tokens (`agree`).
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import sleep
from typing import Any, Protocol, TypeVar
from weakref import WeakSet
from zlib import crc32

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from outrider.errors import OutriderError
from outrider.runtime.processes import local_device, rank, torchrun_command, world_size
from outrider.runtime.watchdog import Watchdog

T = TypeVar("T")
# Of one collective operation of the model. It ends a hang in which all processes stay alive.
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# Ranks may wait long for rank 0, for example for a request. The watchdog ends them if rank 0 is gone.
_CONTROL_TIMEOUT = timedelta(days=365)
_ALONE_TIMEOUT = 5.0  # seconds that a rank with a failure waits for the others to ask about it
_EXIT_DELAY = 1.0  # seconds in which error messages are still sent before the process ends


class RankError(OutriderError):
    """The ranks cannot go on together. The process must end."""


class Holder(Protocol):
    """An object that uses the process group until it is released."""

    def release(self) -> None:
        """Drop what uses the process group."""


class Ranks:
    """The process group of tensor parallelism."""

    def __init__(self, size: int, device: str) -> None:
        """Join the group that torchrun has started. See `join`."""
        self.rank = rank()
        self.size = size
        self.on_failure: Callable[[str], None] = lambda reason: None  # called before a failure ends the process
        self.holders: WeakSet[Holder] = WeakSet()  # released before the group is destroyed
        cuda = torch.device(local_device(device)).type == "cuda" if device != "auto" else torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        store, _, _ = next(rendezvous("env://"))
        self._abandoning = threading.Lock()
        # Start it before the groups exist. Otherwise a rank that dies while they are made blocks the others.
        self._watchdog = Watchdog(store.clone(), rank=self.rank, size=size, on_failure=self.abandon)
        self._watchdog.start()
        atexit.register(self._exit)
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("outrider/group", store),
            rank=self.rank,
            world_size=size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self._control = distributed.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reads input and writes output."""
        return self.rank == 0

    def share(self, values: Sequence[float]) -> tuple[float, ...]:
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.broadcast(tensor, 0, group=self._control)
        return tuple(tensor.tolist())

    def share_object(self, value: T) -> T:
        """Return the object of rank 0, by pickle."""
        values = [value]
        distributed.broadcast_object_list(values, 0, group=self._control)
        return values[0]

    def agree(self, tokens: Sequence[Sequence[int]], values: Sequence[float]) -> tuple[float, ...]:
        """Check that this rank has the tokens of rank 0, and return the values of rank 0.

        Raises:
            RankError: the tokens differ.
        """
        digest = float(crc32(repr(tokens).encode()))
        expected, *shared = self.share((digest, *values))
        if digest != expected:
            raise RankError(
                f"rank {self.rank} has other tokens than rank 0, so its hardware or libraries"
                " compute differently; use equal machines"
            )
        return tuple(shared)

    def all_true(self, value: bool, failure: str = "") -> bool:
        """Return whether the value is true in all ranks.

        If one rank fails, the others may be blocked in a collective of the model and never reach this call. The failing
        rank therefore exits with `failure` if they do not call within a few seconds.

        Args:
            failure: why it is false; "": all ranks ask at the same place, whatever their values are.
        """
        tensor = torch.tensor(int(value))
        reason = f"rank {self.rank} has failed alone: {failure}"
        timer = threading.Timer(_ALONE_TIMEOUT, self._abandon_alone, (reason,))
        timer.daemon = True
        if failure and not value:
            timer.start()
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._control)
        timer.cancel()
        return bool(tensor)

    def barrier(self) -> None:
        """Wait for all ranks, without a time limit."""
        distributed.barrier(self._control)

    def leave(self) -> None:
        """Leave the group after all ranks have done their work."""
        global _joined
        self.barrier()
        self._watchdog.finish()
        self._release()
        distributed.destroy_process_group()
        _joined = None

    def _release(self) -> None:
        for holder in self.holders:
            holder.release()

    def _exit(self) -> None:
        """Tell the other ranks how this process has ended."""
        if error := getattr(sys, "last_value", None):
            self._watchdog.fail(str(error))
        else:
            self._watchdog.finish()
        self._release()

    def _abandon_alone(self, reason: str) -> None:
        """End this process for a failure that rank 0 may learn of only by a lost connection."""
        if not self.first:
            print(f"error: {reason}", file=sys.__stderr__, flush=True)
        self.abandon(reason)

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on. They end."""
        self._watchdog.fail(reason)

    def abandon(self, reason: str) -> None:
        """End this process with status 1. The model cannot run without the other ranks."""
        if not self._abandoning.acquire(blocking=False):
            return  # another thread is about to end the process
        self.fail(f"it was ended because {reason}")
        try:
            self.on_failure(reason)
        finally:
            if self.first:
                print(f"error: {reason}; the server or program ends", file=sys.__stderr__, flush=True)
            sleep(_EXIT_DELAY)
            os._exit(1)  # other threads may wait for a rank that does not answer


_joined: Ranks | None = None


def join(size: int, device: str = "auto") -> Ranks | None:
    """Join the ranks of tensor parallelism, once per process.

    Args:
        size: number of ranks; 1: there is no tensor parallelism.
        device: as in `EngineConfig`.

    Returns:
        The ranks; None with a size of 1.

    Raises:
        OutriderError: torchrun has not started this process, or has started another number of processes.
    """
    global _joined
    if size == 1:
        return None
    if _joined is not None:
        if _joined.size != size:
            raise OutriderError(f"tp is {size}, and the processes have joined with tp {_joined.size}; use one number")
        return _joined
    if "RANK" not in os.environ:
        raise OutriderError(f"tp {size} needs {size} processes; run {torchrun_command(size)}")
    if world_size() != size:
        raise OutriderError(
            f"torchrun has started {world_size()} processes, and tp is {size}; use --nproc-per-node"
            f" {size}, or tp {world_size()}"
        )
    if distributed.is_initialized():
        raise OutriderError("a process group exists already; let Outrider make it, so load the model before others do")
    _joined = Ranks(size, device)
    return _joined


def current() -> Ranks | None:
    """Return the ranks that this process has joined, or None."""
    return _joined


def of_first_rank(value: T) -> T:
    """Return the value of rank 0, or `value` itself without tensor parallelism."""
    return value if _joined is None else _joined.share_object(value)


def seconds_of_first_rank(seconds: float) -> float:
    """Return a measured time of rank 0, or `seconds` itself without tensor parallelism."""
    return seconds if _joined is None else _joined.share((seconds,))[0]


def all_ranks(value: bool, failure: str = "") -> bool:
    """Return whether the value is true in all ranks, or `value` itself without tensor parallelism.

    `failure` is that of `Ranks.all_true`.
    """
    return value if _joined is None else _joined.all_true(value, failure)


def is_first_rank() -> bool:
    """Return whether this process writes files and output: rank 0, or the only process."""
    return _joined is None or _joined.first


def is_network_error(error: Exception) -> bool:
    """Return whether an exception of a collective operation says that another rank is gone or does not answer."""
    kinds = (distributed.DistError, RuntimeError)
    words = ("gloo", "nccl", "connection", "timed out", "socket")
    return isinstance(error, kinds) and any(word in str(error).lower() for word in words)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all ranks. All ranks must call it."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")
