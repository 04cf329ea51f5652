"""Stopwatches measure the parts of a round on the host and on a GPU.

A call that starts work on a GPU returns before the work is done, so the host measures only the launch. It waits for the
work where it reads the result. So a mark is an event in the queue of the device, and the device records its time.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from outrider.core.types import Batch, Draft, Scores


class Stopwatch(Protocol):
    """Measures the time of a round and of its parts."""

    def now(self) -> float:
        """Return the time of the host, in seconds of `perf_counter`."""

    def mark(self) -> Any:
        """Return a mark of the moment at which all work so far is done. This does not wait for the work."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks. The host has read a result of later work of the device."""


class RoundTimes(NamedTuple):
    """When the phases of a round ended, in seconds of `perf_counter`."""

    began: float
    drafted: float
    verified: float
    committed: float
    draft_tokens: int  # verified draft tokens of all sequences


class RoundSeconds(NamedTuple):
    """The seconds of the parts of one round."""

    draft: float
    target: float
    host: float

    @property
    def total(self) -> float:
        """The seconds of the round."""
        return self.draft + self.target + self.host


class RoundTimer:
    """Measures one round. It begins when the timer is made."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._scoring: list[Any] = []  # marks: begin and end of each pass
        self._began = watch.now()

    def draft(self, propose: Callable[[Batch], Draft], batch: Batch) -> Draft:
        """Return what `propose` drafts, and measure it."""
        self._planned = self._watch.now()
        begin = self._watch.mark()
        draft = propose(batch)
        self._drafting = begin, self._watch.mark()
        return draft

    def score(self, score: Callable[[Batch, Draft], Scores], batch: Batch, draft: Draft) -> Scores:
        """Return the scores of a pass, and measure it. A round has one or several passes."""
        begin = self._watch.mark()
        scores = score(batch, draft)
        self._scoring += begin, self._watch.mark()
        return scores

    def verified(self) -> None:
        """Note that the round is verified."""
        self._verified = self._watch.now()

    def committed(self) -> RoundSeconds:
        """Note that the round is committed, and return the seconds of its parts."""
        self._committed = self._watch.now()
        seconds = self._watch.seconds
        self._draft_seconds = draft = seconds(*self._drafting)
        target = sum(map(seconds, self._scoring[::2], self._scoring[1::2]))
        return RoundSeconds(draft, target, self._committed - self._began - draft - target)

    def times(self, draft_tokens: int) -> RoundTimes:
        """Return the times of a committed round with this many verified draft tokens."""
        drafted = min(self._planned + self._draft_seconds, self._verified)
        return RoundTimes(self._began, drafted, self._verified, self._committed, draft_tokens)


class HostStopwatch:
    """The stopwatch of a CPU, whose calls return when the work is done."""

    now = mark = staticmethod(perf_counter)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaStopwatch:
    """The stopwatch of a GPU. A mark is an event in the stream of the device.

    An idle device records an event at once, so the time between two marks includes work on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    now = staticmethod(perf_counter)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # returns at once, since the device has recorded the event
        return float(begin.elapsed_time(end)) / 1e3


def find_stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
