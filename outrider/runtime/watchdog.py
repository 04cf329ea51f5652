"""Detect that another process has died or stopped, even while this one waits for it."""

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from torch.distributed.distributed_c10d import Store

_INTERVAL = 0.5  # seconds between heartbeats
_SILENCE = 6.0  # seconds without a heartbeat after which a process counts as stopped
_FAILED, _DONE = "failed ", "done"


class Watchdog:
    """A thread that writes a counter to the store of the process group and reads those of the other ranks.

    A collective operation does not always raise if a peer is gone. NCCL waits, and a stopped process keeps its
    connections. So the ranks watch each other through the store.
    """

    def __init__(self, store: Store, *, rank: int, size: int, on_failure: Callable[[str], None]) -> None:
        """Watch the other ranks. `on_failure` is called in the thread of the watchdog, once, with the reason."""
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._on_failure = on_failure
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._write("0")
        self._thread.start()

    def finish(self) -> None:
        """Tell the other ranks that this one ends as it should, and stop watching them."""
        self._end(_DONE)

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one ends with an error."""
        self._end(f"{_FAILED}{reason}")

    def _end(self, last: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            with suppress(RuntimeError):  # without a store, the others notice that the heartbeats stop
                self._write(last)

    def _write(self, value: str) -> None:
        self._store.set(_key(self._rank), value)

    def _run(self) -> None:
        began = monotonic()
        seen = dict.fromkeys(self._others, ("", began))
        beats = 0
        while not self._ended.wait(_INTERVAL):
            beats += 1
            try:
                with self._lock:
                    if self._ended.is_set():
                        return
                    self._write(str(beats))
                reason = self._failure(seen)
            except RuntimeError as error:
                reason = f"the store of the process group cannot be reached ({str(error).splitlines()[0]})"
            if reason:
                self._ended.set()
                self._on_failure(reason)
                return

    def _failure(self, seen: dict[int, tuple[str, float]]) -> str:
        """Return why a rank counts as failed, or "". `seen` has the last value of each rank and its time."""
        now = monotonic()
        for other, (last, at) in seen.items():
            if last == _DONE:
                continue
            value = self._store.get(_key(other)).decode() if self._store.check([_key(other)]) else ""
            if value.startswith(_FAILED):
                return f"rank {other} has failed: {value.removeprefix(_FAILED)}"
            if value != last:
                seen[other] = (value, now)
            elif last and now - at > _SILENCE:  # without a first heartbeat it has not started yet
                return f"rank {other} has not answered for {_SILENCE:g} seconds"
        return ""


def _key(rank: int) -> str:
    return f"outrider/heartbeat/{rank}"
