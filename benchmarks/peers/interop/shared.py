"""The request and the counts of both engines. It needs only the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Greedy completions of prompts, one at a time, once with each draft."""

    targets: Sequence[str]  # what vLLM serves with each draft: the target, or a copy with an MTP module in it
    speculations: Sequence[Mapping[str, Any]]  # vLLM's speculative configuration for each draft
    k: int  # draft tokens per round
    dtype: str
    threads: int
    max_tokens: int
    context: int  # tokens of the longest prompt, its completion, and the draft tokens after it
    ends: Sequence[int]  # tokens that end a completion
    prompts: Sequence[Sequence[int]]  # token ids

    def to_json(self) -> dict[str, Any]:
        """Return the arguments from which the other process makes the same request."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rounds with a draft, and accepted draft tokens.

    The last round counts with all draft tokens that it accepts, even those after the end of the completion.
    """

    rounds: int
    accepted: tuple[int, ...]  # by position

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Counts:
        """Return the counts of `to_json`."""
        return cls(rounds=data["rounds"], accepted=tuple(data["accepted"]))

    @property
    def length(self) -> float:
        """Mean acceptance length: the accepted draft tokens and the target's own token."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts and their mean acceptance length."""
        return {"rounds": self.rounds, "accepted": list(self.accepted), "length": self.length}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """One completion."""

    tokens: tuple[int, ...]  # without the end token
    counts: Counts

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Completed:
        """Return the completion of `to_json`."""
        return cls(tokens=tuple(data["tokens"]), counts=Counts.of_json(data["counts"]))

    def to_json(self) -> dict[str, Any]:
        """Return the completion for JSON."""
        return {"tokens": list(self.tokens), "counts": self.counts.to_json()}


def total(counts: Sequence[Counts]) -> Counts:
    """Return the sum of several counts. They may have different numbers of positions."""
    depth = max((len(each.accepted) for each in counts), default=0)
    accepted = [sum(each.accepted[i] for each in counts if i < len(each.accepted)) for i in range(depth)]
    return Counts(rounds=sum(each.rounds for each in counts), accepted=tuple(accepted))


def cut(tokens: Sequence[int], request: Request) -> tuple[int, ...]:
    """Return the tokens before the first end token, at most `max_tokens`."""
    end = next((i for i, token in enumerate(tokens) if token in request.ends), len(tokens))
    return tuple(tokens[: min(end, request.max_tokens)])
