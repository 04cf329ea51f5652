"""Routers: which replica gets a request."""

from collections.abc import Callable, Sequence

from outrider.errors import OutriderError, either
from outrider.scale.fleet.arrivals import Arrival
from outrider.scale.fleet.replica import Replica

Router = Callable[[Arrival], Replica]
_SLACK = 1.5  # a replica with the prefix may have this many times the mean load, and
_SLACK_REQUESTS = 2  # this many requests more
NAMES = ("round-robin", "least-loaded", "prefix")


def make_router(name: str, replicas: Sequence[Replica]) -> Router:
    """Return a router by its name in `NAMES`.

    - round-robin: one replica after another.
    - least-loaded: the replica with the fewest running and waiting requests.
    - prefix: a replica that holds the KV cache of the prefix, unless it is overloaded; then the least loaded one.

    Raises:
        OutriderError: there is no such router.
    """
    if name == "round-robin":
        return _round_robin(replicas)
    if name == "least-loaded":
        least_loaded = _LeastLoaded()
        return lambda _: least_loaded(replicas)
    if name == "prefix":
        return _prefix_aware(replicas)
    raise OutriderError(f"--routing is {name!r}; use {either(NAMES)}")


def _round_robin(replicas: Sequence[Replica]) -> Router:
    last = -1

    def route(_: Arrival) -> Replica:
        nonlocal last
        last = (last + 1) % len(replicas)
        return replicas[last]

    return route


class _LeastLoaded:
    """Chooses the least loaded replica. Those with equal loads take turns, so that none gets most of the requests."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, replicas: Sequence[Replica]) -> Replica:
        loads = [replica.load for replica in replicas]
        least = min(loads)
        self._turn += 1
        start = self._turn % len(replicas)
        after = next((i for i in range(start, len(loads)) if loads[i] == least), None)
        return replicas[loads.index(least) if after is None else after]


def _prefix_aware(replicas: Sequence[Replica]) -> Router:
    least_loaded = _LeastLoaded()

    def route(arrival: Arrival) -> Replica:
        if arrival.prefix:
            holders = [replica for replica in replicas if replica.has_prefix(arrival.prefix)]
            mean = sum(replica.load for replica in replicas) / len(replicas)
            if holders and (best := least_loaded(holders)).load <= _SLACK * mean + _SLACK_REQUESTS:
                return best
        return least_loaded(replicas)

    return route
