"""Stopwatches: how long the parts of a round take, also on a device that runs behind the host.

A call that starts work on a GPU returns before the work is done. The host's time around such a call is the time of the
launch. The work itself is waited for where the host reads the result, and would count there. So a mark is a place in
the queue of the device: the device notes the time when it gets there.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch


class Span(NamedTuple):
    """A part of a round, between two marks of a stopwatch."""

    begin: Any
    end: Any


class Stopwatch(Protocol):
    """Measures the time of a round and of its parts."""

    def now(self) -> float:
        """Return the time of the host, in seconds of `perf_counter`."""

    def mark(self) -> Any:
        """Return a mark of the moment at which all work so far is done. This does not wait for the work."""

    def seconds(self, span: Span) -> float:
        """Return the seconds between the marks of a span. The host has read a result of later work of the device."""


class HostStopwatch:
    """The stopwatch of a CPU, whose calls return when the work is done."""

    def now(self) -> float:
        return perf_counter()

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, span: Span) -> float:
        return float(span.end - span.begin)


class CudaStopwatch:
    """The stopwatch of a GPU. A mark is an event in the stream of the device.

    A device without work passes a mark at once, so the time of work on the host counts as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        return perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, span: Span) -> float:
        span.end.synchronize()  # returns at once, since the device has passed the mark
        return float(span.begin.elapsed_time(span.end)) / 1e3


def find_stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
