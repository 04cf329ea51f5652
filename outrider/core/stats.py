"""Counts and seconds of generation; rounds add up, and one inexact round makes the sum inexact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Sums over rounds or requests.

    A *pass* is one row decoding in one target pass; a row that only feeds its prompt makes none. Position i counts
    from 0: `reached[i]` passes offered a guess at depth i and accepted all above it, `accepted[i]` kept it too.
    """

    rounds: int = 0
    passes: int = 0
    prompt_tokens: int = 0  # tokens
    output_tokens: int = 0  # tokens
    draft_tokens: int = 0  # nodes
    offered: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    host_seconds: float = 0.0  # all else: scheduling, warping, verification, commit, text
    exact: bool = True

    @classmethod
    def of_passes(
        cls,
        passes: Iterable[tuple[int, int, int]],
        *,
        drafted: int | None = None,
        prompt: int = 0,
        exact: bool = True,
    ) -> Stats:
        """Sum up (deepest guess, accepted, emitted) triples, one a pass; None drafted: they were chains."""
        triples = list(passes)
        depth = max((offered for offered, _, _ in triples), default=0)
        return cls(
            rounds=len(triples),
            passes=len(triples),
            prompt_tokens=prompt,
            output_tokens=sum(emitted for _, _, emitted in triples),
            draft_tokens=sum(offered for offered, _, _ in triples) if drafted is None else drafted,
            offered=tuple(sum(offered > i for offered, _, _ in triples) for i in range(depth)),
            reached=tuple(sum(offered > i and kept >= i for offered, kept, _ in triples) for i in range(depth)),
            accepted=tuple(sum(kept > i for _, kept, _ in triples) for i in range(depth)),
            exact=exact,
        )

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            rounds=self.rounds + other.rounds,
            passes=self.passes + other.passes,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            offered=_sum(self.offered, other.offered),
            reached=_sum(self.reached, other.reached),
            accepted=_sum(self.accepted, other.accepted),
            draft_seconds=self.draft_seconds + other.draft_seconds,
            target_seconds=self.target_seconds + other.target_seconds,
            host_seconds=self.host_seconds + other.host_seconds,
            exact=self.exact and other.exact,
        )

    @property
    def total(self) -> Stats:
        """As they stand: what a `StatsAccumulator` has, too."""
        return self

    @property
    def tau(self) -> float:
        """Mean tokens emitted a pass, the bonus included; 1 is plain decoding."""
        return self.output_tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance by position: of the guesses whose ancestors were all accepted, the share kept."""
        return tuple(kept / met if met else 0.0 for kept, met in zip(self.accepted, self.reached, strict=True))

    @property
    def seconds(self) -> float:
        """Of all rounds, everything included."""
        return self.draft_seconds + self.target_seconds + self.host_seconds

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report; ms are per round."""
        per_round = 1e3 / self.rounds if self.rounds else 0.0
        return {
            "rounds": self.rounds,
            "passes": self.passes,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": sum(self.accepted),
            "tau": self.tau,
            "acceptance_by_position": list(self.acceptance),
            "draft_ms": self.draft_seconds * per_round,
            "target_ms": self.target_seconds * per_round,
            "host_ms": self.host_seconds * per_round,
            "exact": self.exact,
        }


class StatsAccumulator:
    """`Stats` that grow in place: a round costs the host microseconds, and most sums are looked at by nobody."""

    def __init__(self, *, exact: bool = True) -> None:
        self._exact = exact
        self._rounds = self._passes = self._prompt = self._emitted = self._drafted = 0
        self._offered, self._reached, self._accepted = list[int](), list[int](), list[int]()
        self._seconds = [0.0, 0.0, 0.0]  # of proposing, of the target, of the host

    @property
    def rounds(self) -> int:
        return self._rounds

    @property
    def total(self) -> Stats:
        """The sums so far."""
        depth = len(self._accepted)  # which grows last: another thread may look in the middle of a round
        propose, target, host = self._seconds
        return Stats(
            rounds=self._rounds,
            passes=self._passes,
            prompt_tokens=self._prompt,
            output_tokens=self._emitted,
            draft_tokens=self._drafted,
            offered=tuple(self._offered[:depth]),
            reached=tuple(self._reached[:depth]),
            accepted=tuple(self._accepted[:depth]),
            draft_seconds=propose,
            target_seconds=target,
            host_seconds=host,
            exact=self._exact,
        )

    def add(self, passes: Sequence[tuple[int, int, int]], *, drafted: int, prompt: int = 0) -> None:
        """Count passes as `Stats.of_passes` does, but as no round."""
        self._passes += len(passes)
        self._prompt += prompt
        self._drafted += drafted
        for offered, kept, emitted in passes:
            self._emitted += emitted
            if offered > len(self._accepted):
                for counts in (self._offered, self._reached, self._accepted):
                    counts += [0] * (offered - len(counts))
            for i in range(offered):
                self._offered[i] += 1
                self._reached[i] += i <= kept
                self._accepted[i] += i < kept

    def took(self, *, propose: float, target: float, host: float) -> None:
        """Count a round, and its seconds."""
        self._rounds += 1
        before = self._seconds
        self._seconds = [before[0] + propose, before[1] + target, before[2] + host]


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
