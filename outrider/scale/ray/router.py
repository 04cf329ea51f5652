"""The request router of Ray Serve that prefers the replica with the longest cached prefix, unless it is busy."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.scale.ray.bridge import HTTPRequest
from outrider.scale.ray.prefixes import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks the replicas: first those with the longest known prefix of the prompt, then all others.

    A replica that has many more requests than the one with the fewest loses its preference. Among
    replicas of one rank, Ray Serve chooses the one with the shortest queue.
    """

    def initialize_state(self, max_imbalance: int = 4, **_: Any) -> None:
        """Prefer a replica for its prefix if it has at most `max_imbalance` more requests than another one."""
        self._max_imbalance = max_imbalance
        self._table = PrefixTable()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = list(candidate_replicas)
        matches = self._table.matches(_blocks(pending_request))
        if not matches:
            return [replicas]
        lengths = self.replica_queue_len_cache  # the last known number of requests of each replica
        loads = {replica.replica_id: lengths.get(replica.replica_id) or 0 for replica in replicas}
        most = min(loads.values(), default=0) + self._max_imbalance
        known = {id: matches[id] for id, load in loads.items() if id in matches and load <= most}
        longest = max(known.values(), default=0)
        first = [replica for replica in replicas if longest and known.get(replica.replica_id) == longest]
        others = [replica for replica in replicas if replica not in first]
        return list(filter(None, (first, others)))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.add(_blocks(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id)


def _blocks(pending_request: PendingRequest | None) -> tuple[int, ...]:
    """Return the blocks of the prompt of a request; () for other calls of a replica."""
    arguments = pending_request.args if pending_request else ()
    return arguments[0].prefix if arguments and isinstance(arguments[0], HTTPRequest) else ()
