"""Prometheus histograms of request latencies."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily

_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds
_REQUEST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds


@dataclass(slots=True)
class _RequestTimes:
    """The times of a running request."""

    start: float
    last_token: float
    num_tokens: int = 0


class LatencyMetrics:
    """Latencies and finish reasons of requests. Only the engine thread writes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._ttft = Histogram(
            "outrider_time_to_first_token_seconds",
            "Time from the request to its first token",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._inter_token = _InterTokenLatency()
        registry.register(self._inter_token)
        self._e2e = Histogram(
            "outrider_e2e_request_latency_seconds",
            "Time from the request to its end",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "outrider_requests", "Finished completions by finish reason", ["finish_reason"], registry=registry
        )
        self._running: dict[int, _RequestTimes] = {}

    def begin(self, id: int) -> None:
        """Start the clock of a request."""
        now = perf_counter()
        self._running[id] = _RequestTimes(start=now, last_token=now)

    def record(self, id: int, now: float, tokens: int) -> None:
        """Record that a request has `tokens` output tokens at time `now`."""
        times = self._running[id]
        if tokens == times.num_tokens:  # a request that ends with an error
            return
        if not times.num_tokens:
            self._ttft.observe(now - times.start)
        else:
            num_new = tokens - times.num_tokens
            self._inter_token.observe((now - times.last_token) / num_new, num_new)
        times.last_token = now
        times.num_tokens = tokens

    def end(self, id: int, finish_reason: str) -> None:
        """Record the end of a request."""
        times = self._running.pop(id)
        self._e2e.observe(perf_counter() - times.start)
        self._finished.labels(finish_reason).inc()


class _InterTokenLatency:
    """A histogram that counts all tokens of a round in one call."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """Count `count` tokens, each after `seconds` seconds."""
        self._counts[bisect_left(_TOKEN_BUCKETS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        upper_bounds = [*map(str, _TOKEN_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "outrider_inter_token_latency_seconds",
            "Time between output tokens; the tokens of a round share its time",
            buckets=list(zip(upper_bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
