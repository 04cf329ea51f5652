"""Prometheus histograms of request latencies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class _Times:
    began: float
    last: float
    tokens: int = 0


class LatencyMetrics:
    """Latencies and finish reasons of requests. Only the engine thread writes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._ttft = Histogram(
            "outrider_time_to_first_token_seconds", "From request to first token", buckets=_LONG, registry=registry
        )
        self._inter_token = _InterTokenLatency()
        registry.register(self._inter_token)
        self._e2e = Histogram(
            "outrider_e2e_request_latency_seconds", "From request to last token", buckets=_LONG, registry=registry
        )
        self._finished = Counter("outrider_requests", "Requests by how they ended", ["finish"], registry=registry)
        self._open: dict[int, _Times] = {}

    def begin(self, id: int) -> None:
        """Start the clock of a request."""
        now = perf_counter()
        self._open[id] = _Times(now, now)

    def record(self, id: int, now: float, tokens: int) -> None:
        """Record that a request has `tokens` output tokens at time `now`."""
        times = self._open[id]
        if tokens == times.tokens:  # a request that ends with an error
            return
        if not times.tokens:
            self._ttft.observe(now - times.began)
        else:
            new = tokens - times.tokens
            self._inter_token.observe((now - times.last) / new, new)
        times.last, times.tokens = now, tokens

    def end(self, id: int, how: str) -> None:
        """Record the end of a request and its finish reason `how`."""
        times = self._open.pop(id)
        self._e2e.observe(perf_counter() - times.began)
        self._finished.labels(how).inc()


class _InterTokenLatency:
    """A histogram that counts all tokens of a round in one call."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SHORT) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(_SHORT, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        ends = [*map(str, _SHORT), "+Inf"]
        yield HistogramMetricFamily(
            "outrider_inter_token_latency_seconds",
            "Time between output tokens; the tokens of a round share its time",
            buckets=list(zip(ends, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
