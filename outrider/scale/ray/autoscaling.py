"""How many replicas there should be: by the requests that run and wait, and by tokens/s."""

from collections.abc import Callable
from time import monotonic
from typing import Any

METRIC = "tokens_per_second"  # name of what a replica reports


class LoadPolicy:
    """An autoscaling policy of Ray Serve. The larger of two numbers of replicas counts.

    The first one is the number of requests, running and waiting, over the target of a replica. The second one is the
    sum of the tokens/s of all replicas over the target of a replica. Ray Serve averages both over its window, applies
    its delays, and keeps the result between the least and the largest number of replicas.
    """

    def __init__(self, target_tokens_per_second: float | None = None) -> None:
        """Scale by requests, and by tokens/s unless their target is None."""
        self._target = target_tokens_per_second

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas for a `ray.serve.config.AutoscalingContext`, and a state, which is empty."""
        replicas = context.total_num_requests / context.config.target_ongoing_requests
        if self._target is not None:
            # A replica that has just started has not reported yet.
            reported = (context.aggregated_metrics or {}).get(METRIC, {})
            replicas = max(replicas, sum(reported.values()) / self._target)
        return replicas, {}


class TokenRate:
    """Tokens per second between two readings of a counter."""

    def __init__(self, tokens: int, clock: Callable[[], float] = monotonic) -> None:
        """Begin with the counter at `tokens`. `clock` returns seconds."""
        self._clock = clock
        self._tokens = tokens
        self._time = clock()

    def read(self, tokens: int) -> float:
        """Return the tokens per second since the last reading."""
        now = self._clock()
        seconds = now - self._time
        rate = (tokens - self._tokens) / seconds if seconds > 0 else 0.0
        self._tokens = tokens
        self._time = now
        return rate
