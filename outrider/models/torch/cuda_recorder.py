"""Record a pass as a CUDA graph, without a wait for the host."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol, TextIO
from weakref import WeakKeyDictionary

import torch

from outrider.runtime.ranks import current

_WAIT = "synchronizing CUDA operation"  # in the warning of the debug mode


class Recorder(Protocol):
    """Records a function. The result repeats it, writing to the same memory."""

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record `run`. It is called several times."""

    def bytes(self) -> int:
        """Return the bytes of the recordings that are still in use."""

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call of `run`, with the work that it starts on the device."""


class CudaRecorder:
    """Records CUDA graphs in one memory pool. Only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, int] = WeakKeyDictionary()  # with the bytes of each
        if (ranks := current()) is not None:
            ranks.holders.add(self)

    def bytes(self) -> int:
        return sum(self._graphs.values())

    def seconds(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return perf_counter() - began

    def release(self) -> None:
        """Free the recordings. NCCL waits for them when its communicator is destroyed. None may run afterwards."""
        for graph in self._graphs:
            graph.reset()

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        with torch.cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        torch.cuda.empty_cache()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # a pool ends with the last of its graphs
        reserved = torch.cuda.memory_reserved(self._device)
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                run()  # the first call creates library handles and compiles layers
                # A synchronization with the host fails here rather than during the capture.
                with forbid_synchronization():
                    run()
        finally:  # after a failure as well: the buffers of the pass are freed while the device may still read them
            main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # During a capture, the watchdog of NCCL queries events in its own thread, which "global"
        # would not allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._graphs[graph] = max(torch.cuda.memory_reserved(self._device) - reserved, 0)

        def replay() -> Any:
            graph.replay()
            return out

        return replay


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Raise RuntimeError at the end if this thread has waited for the device.

    The debug mode of torch holds for all threads of the process. Other threads may wait, so the
    mode is to warn, and only warnings of this thread count.
    """
    thread = threading.get_ident()
    waits: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if _WAIT not in str(message):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == thread:
                waits.append(f"{filename}:{lineno}")

        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", f".*{_WAIT}")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise RuntimeError(f"the pass waits for the device at {waits[0]}")
