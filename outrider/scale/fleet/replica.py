"""A simulated replica: continuous batching with the measured cost of its rounds."""

import random
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from outrider.scale.estimate.pair import Acceptance
from outrider.scale.fleet.arrivals import Arrival
from outrider.scale.fleet.costs import ServerCosts
from outrider.scale.fleet.speculation import Policy, draw

PUBLISH_SECONDS = 0.04  # `PUBLISH_INTERVAL` of the server
_MIN_CHUNK = 16  # prompt tokens of a round, even if it then takes longer than the limit (`engine.prefill_budget`)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """A server: the costs of its rounds, and the limits of `outrider serve`."""

    server: ServerCosts
    acceptance: Acceptance
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_round_seconds: float = 0.06  # of a round in which sequences decode; 0: no limit
    publish_seconds: float = PUBLISH_SECONDS  # least time between two chunks of a stream, but for its first and last
    prefix_cache_tokens: int = 100_000  # tokens of shared prefixes that are kept


@dataclass(slots=True, kw_only=True)
class Job:
    """A request in a replica."""

    arrival: Arrival
    done: Any  # the SimPy event of its end
    arrived: float
    unfed: int = 0  # prompt tokens that are not processed yet
    emitted: int = 0
    first_token: float | None = None
    finished: float | None = None
    hit_tokens: int = 0  # prompt tokens that were in the prefix cache
    published: int = 0  # tokens that were sent to the client

    @property
    def cached(self) -> int:
        """Tokens in the KV cache."""
        return self.arrival.prompt - self.unfed + self.emitted


@dataclass(slots=True)
class Counts:
    """The totals of a replica."""

    rounds: int = 0
    tokens: int = 0
    chunks: int = 0  # of all streams
    passes: int = 0  # decoding sequences, summed over rounds
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    busy_seconds: float = 0.0
    requests: int = 0


@dataclass(slots=True)
class Replica:
    """Runs rounds while there are requests. It admits waiting requests to free slots before each round.

    A round decodes all running sequences and processes a chunk of prompts, as `outrider.engine.scheduler` does. Its
    time is `CostModel.propose` + `CostModel.verify` + the work of the server. Memory is not simulated.
    """

    env: Any  # simpy.Environment
    settings: ReplicaSettings
    policy: Policy
    rng: random.Random
    counts: Counts = field(default_factory=Counts)
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    _prefixes: OrderedDict[str, int] = field(default_factory=OrderedDict)  # tokens, least recently used first
    _wakeup: Any = None
    _admitted: int = 0  # requests admitted since the last round
    _unsent: int = 0  # chunks that the next round must send
    _last_publish: float = 0.0  # time

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.waiting)

    def has_prefix(self, name: str) -> bool:
        """Return whether the KV cache of a prefix is here."""
        return name in self._prefixes

    def submit(self, arrival: Arrival) -> Job:
        """Queue a request."""
        job = Job(arrival=arrival, done=self.env.event(), arrived=self.env.now)
        self.waiting.append(job)
        if self._wakeup is not None and not self._wakeup.triggered:
            self._wakeup.succeed()
        return job

    def run(self) -> Generator[Any, Any, None]:
        """The SimPy process."""
        while True:
            self._admit()
            if not self.running:
                self._wakeup = self.env.event()
                yield self._wakeup
                continue
            seconds, finishing = self._round()
            self.counts.busy_seconds += seconds
            yield self.env.timeout(seconds)
            self._finish_round(finishing)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            job = self.waiting.popleft()
            job.hit_tokens = self._use_prefix(job.arrival)
            job.unfed = job.arrival.prompt - job.hit_tokens
            self.running.append(job)
            self.counts.requests += 1
            self.counts.hit_tokens += job.hit_tokens
            self._admitted += 1

    def _use_prefix(self, arrival: Arrival) -> int:
        """Return the cached tokens of a request's prefix, and keep the prefix."""
        if not arrival.prefix:
            return 0
        hit = arrival.prefix_tokens if arrival.prefix in self._prefixes else 0
        self._prefixes[arrival.prefix] = arrival.prefix_tokens
        self._prefixes.move_to_end(arrival.prefix)
        while sum(self._prefixes.values()) > self.settings.prefix_cache_tokens and len(self._prefixes) > 1:
            self._prefixes.popitem(last=False)
        return hit

    def _round(self) -> tuple[float, list[tuple[Job, int]]]:
        """Return the seconds of the next round, and the tokens that sequences emit at its end."""
        decoding = [job for job in self.running if not job.unfed]
        budget = self._chunk(decoding)
        emitting = list(decoding)
        feed = 0
        for job in self.running:
            if job.unfed and budget > 0:
                length = min(job.unfed, budget)
                budget -= length
                job.unfed -= length
                # The last token of a prompt is scored as a decoding sequence is.
                feed += length if job.unfed else length - 1
                if not job.unfed:
                    emitting.append(job)
        seqs = len(emitting)
        cached = sum(job.cached for job in self.running) / len(self.running)
        allowed = self.policy(seqs, cached) if seqs else 0
        drafts = [min(allowed, job.arrival.output - job.emitted - 1) for job in emitting]
        accepted = [draw(self.settings.acceptance, k, self.rng) if k else 0 for k in drafts]
        emitted = [(job, 1 + count) for job, count in zip(emitting, accepted, strict=True)]
        seconds = self._seconds(seqs, drafts, feed, cached)
        self._count(seqs, drafts, accepted, feed, emitted)
        return seconds, emitted

    def _chunk(self, decoding: list[Job]) -> int:
        """Return how many prompt tokens the next round may process."""
        settings = self.settings
        most = max(settings.max_num_batched_tokens - len(decoding), 1)
        if not decoding or not settings.max_round_seconds:
            return most
        costs = settings.server.costs
        target = costs.target
        cached = sum(job.cached for job in decoding) / len(decoding)
        base = costs.verify(len(decoding), 0, cached=cached)
        token = target.fed or (target.base(most) - target.base(1)) / max(most - 1, 1)
        return min(max(int((settings.max_round_seconds - base) / token) if token else most, _MIN_CHUNK), most)

    def _seconds(self, seqs: int, drafts: list[int], feed: int, cached: float) -> float:
        server = self.settings.server
        costs = server.costs
        mean = sum(drafts) / seqs if seqs else 0.0
        sequences = max(seqs, 1)
        own = self._admitted * server.request_seconds + self._unsent * server.chunk_seconds
        own += seqs * server.sequence_seconds
        self._admitted = 0
        self._unsent = 0
        # `CostModel.verify` counts fed tokens as scored tokens. A prompt token without logits costs less.
        target = costs.target(seqs * (1 + mean), seqs=sequences, cached=cached, feed=feed)
        draft = 0.0
        if costs.draft is not None and any(drafts):
            drafting = sum(1 for k in drafts if k)
            draft = costs.propose(drafting, max(drafts), cached=cached) + server.draft_round_seconds
            draft += drafting * server.draft_sequence_seconds
            if costs.draft.fed is not None:
                draft += costs.draft.fed * feed
            elif feed:
                draft += costs.draft.base(drafting + feed) - costs.draft.base(drafting)
        return costs.host + target + draft + own

    def _count(
        self, seqs: int, drafts: list[int], accepted: list[int], feed: int, emitted: list[tuple[Job, int]]
    ) -> None:
        counts = self.counts
        counts.rounds += 1
        counts.passes += seqs
        counts.drafted += sum(drafts)
        counts.accepted += sum(accepted)
        counts.prompt_tokens += feed
        counts.tokens += sum(count for _, count in emitted)

    def _finish_round(self, emitted: list[tuple[Job, int]]) -> None:
        due = self.env.now - self._last_publish >= self.settings.publish_seconds
        if due:
            self._last_publish = self.env.now
        ended = []
        for job, count in emitted:
            job.emitted += count
            if job.first_token is None:
                job.first_token = self.env.now
            if job.emitted >= job.arrival.output:
                job.finished = self.env.now
                ended.append(job)
            if job.finished is not None or not job.published:
                self._publish(job)
        if due:
            for job in self.running:
                self._publish(job)
        for job in ended:
            self.running.remove(job)
            job.done.succeed()

    def _publish(self, job: Job) -> None:
        """Send the new tokens of a request in one chunk."""
        if job.emitted > job.published:
            job.published = job.emitted
            self._unsent += 1
            self.counts.chunks += 1
