"""Common beginnings of answers to a problem: with those of the previous pass over the problems, and among each other.

Prefix reuse is the share of a new answer that an old one predicts until it first fails. Low
diversity shows that the policy explores little.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

Answer = Sequence[int]  # token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Common beginnings of answers, as means over the answers or the groups of a step."""

    prefix_reuse: float | None = None  # see `prefix_reuse`; None: no problem of the step was seen before
    distinct_answers: float | None = None  # see `distinct_answers`; None: no answers
    prefix_diversity: float | None = None  # see `prefix_diversity`; None: no group of two answers

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Answer]], previous: Mapping[str, Sequence[Answer]]) -> Overlap:
        """Return the figures of the answers in each group, given those of the previous pass by the same names.

        All answers count the same in `prefix_reuse`, and all groups in the other figures.
        """
        reused = []
        for name, answers in groups.items():
            reused += prefix_reuse(answers, previous.get(name, ()))
        distinct = [share for answers in groups.values() if (share := distinct_answers(answers)) is not None]
        diversity = [each for answers in groups.values() if (each := prefix_diversity(answers)) is not None]
        return cls(
            prefix_reuse=mean(reused) if reused else None,
            distinct_answers=mean(distinct) if distinct else None,
            prefix_diversity=mean(diversity) if diversity else None,
        )


def prefix_reuse(answers: Sequence[Answer], previous: Sequence[Answer]) -> list[float]:
    """Return the share of each answer's tokens that are also the beginning of a previous answer to the same problem.

    Of the previous answers, the one with the longest common prefix counts. Answers without tokens
    have no share and are left out. The list is empty if there are no previous answers.
    """
    if not previous:
        return []
    ordered = sorted(map(tuple, previous))
    shares = []
    for answer in map(tuple, answers):
        if answer:
            # Among sorted answers, those next to an answer have the longest common prefix with it.
            place = bisect(ordered, answer)
            nearest = ordered[max(place - 1, 0) : place + 1]
            shares.append(max(_common_prefix(answer, other) for other in nearest) / len(answer))
    return shares


def distinct_answers(answers: Sequence[Answer]) -> float | None:
    """Return the number of different answers divided by the number of answers; None without answers."""
    return len(set(map(tuple, answers))) / len(answers) if answers else None


def prefix_diversity(answers: Sequence[Answer]) -> float | None:
    """Return the mean of 1 - common prefix / longer answer over all pairs of answers; None without a pair.

    0: all answers are equal. 1: no two answers have the same first token. `distinct_answers` is 1 as soon as each
    answer has one token of its own; this figure is then still low if the answers differ at the end only.
    """
    ordered = sorted(map(tuple, answers))
    common = [_common_prefix(one, other) for one, other in pairwise(ordered)]
    diversity = []
    for i, one in enumerate(ordered):
        shared = len(one)
        for j in range(i + 1, len(ordered)):
            shared = min(shared, common[j - 1])  # of sorted answers i to j
            longer = max(len(one), len(ordered[j]))
            diversity.append(1 - shared / longer if longer else 0.0)
    return mean(diversity) if diversity else None


def _common_prefix(one: Answer, other: Answer) -> int:
    """Return the number of equal tokens at the beginning of two answers."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
