"""How long requests take, as Prometheus counts it."""

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
    """Latencies and ends of requests; only the engine's thread writes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._first = Histogram(
            "outrider_time_to_first_token_seconds", "From request to first token", buckets=_LONG, registry=registry
        )
        self._between = _Gaps()
        registry.register(self._between)
        self._whole = Histogram(
            "outrider_request_seconds", "From request to last token", buckets=_LONG, registry=registry
        )
        self._ended = Counter("outrider_requests", "Requests by how they ended", ["finish"], registry=registry)
        self._open: dict[int, _Times] = {}

    def begin(self, id: int) -> None:
        """A request is there."""
        now = perf_counter()
        self._open[id] = _Times(now, now)

    def see(self, id: int, now: float, tokens: int) -> None:
        """So many tokens are there by now."""
        times = self._open[id]
        if tokens == times.tokens:  # a row that ends with an error brings none
            return
        if not times.tokens:
            self._first.observe(now - times.began)
        else:
            new = tokens - times.tokens
            self._between.see((now - times.last) / new, new)
        times.last, times.tokens = now, tokens

    def end(self, id: int, how: str) -> None:
        """It is over, for the reason `how`."""
        times = self._open.pop(id)
        self._whole.observe(perf_counter() - times.began)
        self._ended.labels(how).inc()


class _Gaps:
    """A histogram that takes all tokens of a round at once: it is told of every row in every round."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SHORT) + 1)
        self._sum = 0.0

    def see(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(_SHORT, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        ends = [*map(str, _SHORT), "+Inf"]
        yield HistogramMetricFamily(
            "outrider_inter_token_seconds",
            "Between tokens, those of a round alike",
            buckets=list(zip(ends, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
