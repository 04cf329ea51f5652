"""From the moments at which tokens appeared to speed and latency, without the reading of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.stats import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """The end of one round."""

    at: float  # seconds
    emitted: tuple[int, ...]  # tokens so far, row by row


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """Decoding alone: from the first round by whose end every row had a token, to the last round."""

    tokens: int  # emitted by all rows after that first round
    seconds: float

    @property
    def rate(self) -> float | None:
        """Tokens a second; None when the first round was the last."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def __add__(self, other: DecodeSpeed) -> DecodeSpeed:
        return DecodeSpeed(tokens=self.tokens + other.tokens, seconds=self.seconds + other.seconds)


def opening(marks: Sequence[EmitEvent]) -> int:
    """Index of the first mark at which every row had a token; the last one if none is."""
    return next((i for i, mark in enumerate(marks) if all(mark.emitted)), len(marks) - 1)


def decode_pace(marks: Sequence[EmitEvent]) -> DecodeSpeed:
    """The part of a run in which nothing but decoding happened."""
    first, last = marks[opening(marks)], marks[-1]
    return DecodeSpeed(tokens=sum(last.emitted) - sum(first.emitted), seconds=last.at - first.at)


def token_gaps(marks: Sequence[EmitEvent]) -> list[float]:
    """Seconds between a row's tokens, over all rows.

    The tokens of one round arrive together: the first of them waited for the whole round, the others for nothing. A
    row's first round is left out, since it waited for its prompt.
    """
    gaps: list[float] = []
    for row in range(len(marks[0].emitted)):
        count, since = 0, None
        for mark in marks:
            new = mark.emitted[row] - count
            if not new:
                continue
            if since is not None:
                gaps += [mark.at - since] + [0.0] * (new - 1)
            count, since = mark.emitted[row], mark.at
    return gaps


def timed(counts: Stats, before: Stats, after: Stats) -> Stats:
    """`counts` with the rounds and seconds that an engine spent between two looks at its stats."""
    return replace(
        counts,
        rounds=after.rounds - before.rounds,
        draft_seconds=after.draft_seconds - before.draft_seconds,
        target_seconds=after.target_seconds - before.target_seconds,
        host_seconds=after.host_seconds - before.host_seconds,
    )
