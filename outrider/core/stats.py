"""Counts and times of generation, for one request or for many rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from outrider.core.bound import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Sums over rounds or requests. Add two of them with `+`; the sum is exact if both are.

    A *pass* is one decoding sequence in one forward pass of the target. A sequence that only prefills makes no pass.

    Counts by position are indexed by the depth i of a draft token, from 0. `offered[i]` passes had a draft token at
    depth i. In `reached[i]` of them all of its ancestors were accepted, and in `accepted[i]` it was accepted as well.

    The seconds are measured for rounds only. They are 0 in the statistics of a single request, which shares its rounds.
    """

    rounds: int = 0
    passes: int = 0
    prompt_tokens: int = 0  # whole prompts, counted once they are prefilled, with tokens that the cache held
    output_tokens: int = 0
    draft_tokens: int = 0  # nodes of the draft trees
    offered: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    host_seconds: float = 0.0  # everything else: scheduling, sampling, verification, commit, detokenization
    experts: float = 0.0  # distinct experts of a layer that the target's pass used, a mean over layers; 0: not counted
    exact: bool = True
    bound: Bound | None = None  # how far tokens may be from the target's distribution; None: exact, or not bounded

    @classmethod
    def of_passes(
        cls,
        passes: Iterable[tuple[int, int, int]],
        *,
        drafted: int | None = None,
        prompt: int = 0,
        exact: bool = True,
        bound: Bound | None = None,
    ) -> Stats:
        """Return the statistics of passes.

        Args:
            passes: (draft depth, accepted tokens, emitted tokens) of each pass.
            drafted: number of draft tokens; None: all drafts were chains.
            prompt: number of prompt tokens.
            exact: whether the verifier is exact.
            bound: the bound of a verifier that is not exact.
        """
        counts = list(passes)
        sums = StatsAccumulator(exact=exact, bound=bound)
        sums.add(counts, drafted=sum(depth for depth, _, _ in counts) if drafted is None else drafted, prompt=prompt)
        return replace(sums.total, rounds=len(counts))

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            rounds=self.rounds + other.rounds,
            passes=self.passes + other.passes,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            offered=_add_counts(self.offered, other.offered),
            reached=_add_counts(self.reached, other.reached),
            accepted=_add_counts(self.accepted, other.accepted),
            draft_seconds=self.draft_seconds + other.draft_seconds,
            target_seconds=self.target_seconds + other.target_seconds,
            host_seconds=self.host_seconds + other.host_seconds,
            experts=self.experts + other.experts,
            exact=self.exact and other.exact,
            bound=self._common_bound(other),
        )

    def _common_bound(self, other: Stats) -> Bound | None:
        """Return the bound that holds for both. An exact rule keeps every bound."""
        if self.exact or other.exact:
            return other.bound if self.exact else self.bound
        return self.bound if self.bound == other.bound else None

    @property
    def total(self) -> Stats:
        """The statistics themselves, so that `Stats` can replace a `StatsAccumulator`."""
        return self

    @property
    def tau(self) -> float:
        """Mean tokens emitted per pass, including the bonus token. Plain decoding has 1."""
        return self.output_tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance rate by position, among the draft tokens whose ancestors were all accepted."""
        counts = zip(self.accepted, self.reached, strict=True)
        return tuple(accepted / reached if reached else 0.0 for accepted, reached in counts)

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.host_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values. Times are milliseconds, and experts a mean, per round.

        Times that were not measured are None.
        """

        def milliseconds(seconds: float) -> float | None:
            return 1e3 * seconds / self.rounds if self.rounds and self.seconds else None

        return {
            "rounds": self.rounds,
            "passes": self.passes,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": sum(self.accepted),
            "tau": self.tau,
            "acceptance_by_position": list(self.acceptance),
            "draft_ms": milliseconds(self.draft_seconds),
            "target_ms": milliseconds(self.target_seconds),
            "host_ms": milliseconds(self.host_seconds),
            "experts": self.experts / self.rounds if self.rounds else 0.0,
            "exact": self.exact,
            "bound": self.bound and self.bound.as_dict(),
        }


class StatsAccumulator:
    """`Stats` that are updated in place. This is faster than adding `Stats` in every round."""

    def __init__(self, *, exact: bool = True, bound: Bound | None = None) -> None:
        self._exact = exact
        self._bound = bound
        self._rounds = 0
        self._passes = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._draft_tokens = 0
        self._offered: list[int] = []
        self._reached: list[int] = []
        self._accepted: list[int] = []
        self._seconds = (0.0, 0.0, 0.0)  # draft, target, host
        self._experts = 0.0

    @property
    def rounds(self) -> int:
        return self._rounds

    @property
    def total(self) -> Stats:
        """The sums so far."""
        # `add` extends `_accepted` last. Another thread may read in the middle of a round.
        depth = len(self._accepted)
        draft, target, host = self._seconds
        return Stats(
            rounds=self._rounds,
            passes=self._passes,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            draft_tokens=self._draft_tokens,
            offered=tuple(self._offered[:depth]),
            reached=tuple(self._reached[:depth]),
            accepted=tuple(self._accepted[:depth]),
            draft_seconds=draft,
            target_seconds=target,
            host_seconds=host,
            experts=self._experts,
            exact=self._exact,
            bound=self._bound,
        )

    def add(self, passes: Sequence[tuple[int, int, int]], *, drafted: int, prompt: int = 0) -> None:
        """Add passes, as in `Stats.of_passes`. This does not count a round."""
        self._passes += len(passes)
        self._prompt_tokens += prompt
        self._draft_tokens += drafted
        for offered, accepted, emitted in passes:
            self._output_tokens += emitted
            if offered > len(self._accepted):
                for counts in (self._offered, self._reached, self._accepted):
                    counts += [0] * (offered - len(counts))
            for i in range(offered):
                self._offered[i] += 1
                self._reached[i] += i <= accepted
                self._accepted[i] += i < accepted

    def add_round(self, draft: float, target: float, host: float, *, experts: float = 0.0) -> None:
        """Count one round, its seconds and the distinct experts of its pass."""
        self._rounds += 1
        self._experts += experts
        before = self._seconds
        self._seconds = (before[0] + draft, before[1] + target, before[2] + host)


def _add_counts(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, two, fillvalue=0))
