"""Runs a simulation of a fleet with SimPy."""

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.packages import needed_by
from outrider.errors import OutriderError
from outrider.scale.fleet.arrivals import Arrival
from outrider.scale.fleet.replica import Counts, Job, Replica, ReplicaSettings
from outrider.scale.fleet.routing import Router, make_router
from outrider.scale.fleet.speculation import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a simulation."""

    jobs: tuple[Job, ...]  # finished requests
    counts: tuple[Counts, ...]  # by replica
    seconds: float  # until the last request ended

    @property
    def tokens_per_s(self) -> float:
        """Output tokens/s of the whole fleet."""
        return sum(job.emitted for job in self.jobs) / self.seconds if self.seconds else 0.0


class Fleet:
    """Replicas behind a router."""

    def __init__(
        self, settings: ReplicaSettings, policy: Policy, *, replicas: int, routing: str, seed: int = 0
    ) -> None:
        """Start so many equal replicas. Raises OutriderError if SimPy is not installed, or an argument is invalid."""
        with needed_by("the simulation", "fleet"):
            import simpy
        if replicas < 1:
            raise OutriderError(f"--replicas is {replicas}; use at least 1")
        self._env: Any = simpy.Environment()
        self._replicas = [
            Replica(self._env, settings, policy, random.Random(f"{seed}/{number}")) for number in range(replicas)
        ]
        self._router: Router = make_router(routing, self._replicas)
        self._jobs: list[Job] = []
        for replica in self._replicas:
            self._env.process(replica.run())

    def run_open(self, arrivals: Sequence[Arrival]) -> Result:
        """Send each request at its time, whether or not earlier ones have ended. Return when all have ended."""
        return self._run([self._env.process(self._send_all(arrivals))])

    def run_closed(self, requests: Sequence[Arrival], *, concurrency: int) -> Result:
        """Keep `concurrency` requests running, as `outrider load` does. The times of the requests do not count."""
        remaining = iter(requests)
        return self._run([self._env.process(self._send_sequentially(remaining)) for _ in range(concurrency)])

    def _run(self, senders: list[Any]) -> Result:
        self._env.run(until=self._env.all_of(senders))
        return Result(
            jobs=tuple(self._jobs),
            counts=tuple(replica.counts for replica in self._replicas),
            seconds=float(self._env.now),
        )

    def _submit(self, arrival: Arrival) -> Job:
        job = self._router(arrival).submit(arrival)
        self._jobs.append(job)
        return job

    def _send_all(self, arrivals: Sequence[Arrival]) -> Generator[Any, Any, None]:
        for arrival in arrivals:
            yield self._env.timeout(max(arrival.time - self._env.now, 0.0))
            self._submit(arrival)
        yield self._env.all_of([job.done for job in self._jobs])

    def _send_sequentially(self, remaining: Iterator[Arrival]) -> Generator[Any, Any, None]:
        for arrival in remaining:  # all clients share this iterator
            yield self._submit(arrival).done
