"""What both sides share: what is asked of an engine, and what it counted. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Greedy completions of token ids, one at a time, with a draft."""

    target: str
    draft: str  # in the engine's own format
    method: str  # what vLLM calls it
    k: int  # guesses a round
    dtype: str
    threads: int
    max_tokens: int
    context: int  # tokens of the longest prompt, its completion, and the guesses behind it
    ends: Sequence[int]  # tokens that end a completion
    prompts: Sequence[Sequence[int]]

    def to_json(self) -> dict[str, Any]:
        """For the other side's `Asked(**...)`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rounds in which guesses were checked, the last one included with all that it kept, past the end or not."""

    rounds: int
    accepted: tuple[int, ...]  # guesses kept, by position

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Counts:
        """The inverse of `to_json`."""
        return cls(rounds=data["rounds"], accepted=tuple(data["accepted"]))

    @property
    def length(self) -> float:
        """Mean acceptance length: the target's own token, and the guesses kept before it."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    def to_json(self) -> dict[str, Any]:
        """With the mean length, for people."""
        return {"rounds": self.rounds, "accepted": list(self.accepted), "length": self.length}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """One completion."""

    tokens: tuple[int, ...]  # without what ends it
    counts: Counts

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Completed:
        """The inverse of `to_json`."""
        return cls(tokens=tuple(data["tokens"]), counts=Counts.of_json(data["counts"]))

    def to_json(self) -> dict[str, Any]:
        """As lists and tables."""
        return {"tokens": list(self.tokens), "counts": self.counts.to_json()}


def total(counts: Sequence[Counts]) -> Counts:
    """The sums of several, of different depths perhaps."""
    depth = max((len(each.accepted) for each in counts), default=0)
    columns = [sum(each.accepted[i] for each in counts if i < len(each.accepted)) for i in range(depth)]
    return Counts(rounds=sum(each.rounds for each in counts), accepted=tuple(columns))


def cut(tokens: Sequence[int], asked: Asked) -> tuple[int, ...]:
    """Up to the end of text, `max_tokens` at most."""
    stop = next((i for i, token in enumerate(tokens) if token in asked.ends), len(tokens))
    return tuple(tokens[: min(stop, asked.max_tokens)])
