"""Counts and seconds of generation; rounds add up, and one inexact round makes the sum inexact."""

from __future__ import annotations

from collections.abc import Iterable
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
    prompt: int = 0  # tokens
    emitted: int = 0  # tokens
    drafted: int = 0  # nodes
    offered: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    propose_seconds: float = 0.0
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
            prompt=prompt,
            emitted=sum(emitted for _, _, emitted in triples),
            drafted=sum(offered for offered, _, _ in triples) if drafted is None else drafted,
            offered=tuple(sum(offered > i for offered, _, _ in triples) for i in range(depth)),
            reached=tuple(sum(offered > i and kept >= i for offered, kept, _ in triples) for i in range(depth)),
            accepted=tuple(sum(kept > i for _, kept, _ in triples) for i in range(depth)),
            exact=exact,
        )

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            rounds=self.rounds + other.rounds,
            passes=self.passes + other.passes,
            prompt=self.prompt + other.prompt,
            emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted,
            offered=_sum(self.offered, other.offered),
            reached=_sum(self.reached, other.reached),
            accepted=_sum(self.accepted, other.accepted),
            propose_seconds=self.propose_seconds + other.propose_seconds,
            target_seconds=self.target_seconds + other.target_seconds,
            host_seconds=self.host_seconds + other.host_seconds,
            exact=self.exact and other.exact,
        )

    @property
    def tau(self) -> float:
        """Mean tokens emitted a pass, the bonus included; 1 is plain decoding."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance by position: of the guesses whose ancestors were all accepted, the share kept."""
        return tuple(kept / met if met else 0.0 for kept, met in zip(self.accepted, self.reached, strict=True))

    @property
    def seconds(self) -> float:
        return self.propose_seconds + self.target_seconds + self.host_seconds

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report; ms are per round."""
        per_round = 1e3 / self.rounds if self.rounds else 0.0
        return {
            "rounds": self.rounds,
            "passes": self.passes,
            "prompt_tokens": self.prompt,
            "emitted_tokens": self.emitted,
            "drafted_tokens": self.drafted,
            "accepted_tokens": sum(self.accepted),
            "tau": self.tau,
            "acceptance_by_position": list(self.acceptance),
            "propose_ms": self.propose_seconds * per_round,
            "target_ms": self.target_seconds * per_round,
            "host_ms": self.host_seconds * per_round,
            "exact": self.exact,
        }


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
