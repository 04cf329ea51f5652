"""Compute decoding speed and latency from the times at which tokens were emitted. Prefill is excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.stats import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """The end of one round."""

    at: float  # seconds
    emitted: tuple[int, ...]  # tokens so far, by sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """Tokens and seconds of decoding only.

    Decoding begins with the end of the first round after which every sequence has a token. It ends with the last round.
    """

    tokens: int  # emitted by all sequences after that first round
    seconds: float

    @property
    def rate(self) -> float | None:
        """Tokens per second, or None if the first round was the last."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def __add__(self, other: DecodeSpeed) -> DecodeSpeed:
        return DecodeSpeed(tokens=self.tokens + other.tokens, seconds=self.seconds + other.seconds)


def first_decode_index(events: Sequence[EmitEvent]) -> int:
    """Return the index of the first event at which every sequence had a token, or else of the last event."""
    return next((i for i, event in enumerate(events) if all(event.emitted)), len(events) - 1)


def decode_speed(events: Sequence[EmitEvent]) -> DecodeSpeed:
    """Return the decoding speed of a run."""
    first = events[first_decode_index(events)]
    last = events[-1]
    return DecodeSpeed(tokens=sum(last.emitted) - sum(first.emitted), seconds=last.at - first.at)


def token_gaps(events: Sequence[EmitEvent]) -> list[float]:
    """Return the seconds between the tokens of a sequence, over all sequences.

    The tokens of one round arrive together: the first one waits for the whole round, the others do not wait. The first
    round of a sequence is left out, because it includes the prefill.
    """
    gaps: list[float] = []
    for i in range(len(events[0].emitted)):
        count = 0
        last_at = None
        for event in events:
            num_new = event.emitted[i] - count
            if not num_new:
                continue
            if last_at is not None:
                gaps += [event.at - last_at] + [0.0] * (num_new - 1)
            count = event.emitted[i]
            last_at = event.at
    return gaps


def with_times(counts: Stats, before: Stats, after: Stats) -> Stats:
    """Return `counts` with the rounds and seconds that an engine spent between two snapshots of its statistics."""
    return replace(
        counts,
        rounds=after.rounds - before.rounds,
        draft_seconds=after.draft_seconds - before.draft_seconds,
        target_seconds=after.target_seconds - before.target_seconds,
        host_seconds=after.host_seconds - before.host_seconds,
        experts=after.experts - before.experts,
    )
