"""How long requests take, as Prometheus counts it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class _Times:
    began: float
    last: float
    tokens: int = 0


class Clocks:
    """Latencies and ends of requests; only the engine's thread writes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._first = Histogram(
            "outrider_time_to_first_token_seconds", "From request to first token", buckets=_LONG, registry=registry
        )
        self._between = Histogram(
            "outrider_inter_token_seconds", "Between tokens, those of a round alike", buckets=_SHORT, registry=registry
        )
        self._whole = Histogram(
            "outrider_request_seconds", "From request to last token", buckets=_LONG, registry=registry
        )
        self._ended = Counter("outrider_requests", "Requests by how they ended", ["finish"], registry=registry)
        self._open: dict[int, _Times] = {}

    def begin(self, id: int) -> None:
        now = perf_counter()
        self._open[id] = _Times(now, now)

    def see(self, id: int, now: float, tokens: int) -> None:
        """So many tokens are there by now."""
        times = self._open[id]
        if not tokens:
            return
        if not times.tokens:
            self._first.observe(now - times.began)
        else:
            new = tokens - times.tokens
            for _ in range(new):
                self._between.observe((now - times.last) / new)
        times.last, times.tokens = now, tokens

    def end(self, id: int, how: str) -> None:
        times = self._open.pop(id)
        self._whole.observe(perf_counter() - times.began)
        self._ended.labels(how).inc()
