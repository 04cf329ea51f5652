"""What a round guessed, for those who want to see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.types import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDrafts:
    """One row's guesses of one round, parents before children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1 = the last token before the round
    accepted: tuple[bool, ...]
    source: tuple[str, ...]  # who made them


def drafts_of(round: Round, b: int, names: Sequence[str]) -> RoundDrafts:
    """Row b's; `names` are of those that `Draft.source` numbers."""
    draft = round.draft
    count = int(draft.count[b])
    bits = [1] * count if draft.source is None else draft.source[b][:count]
    kept = frozenset(round.path[b])
    return RoundDrafts(
        tokens=tuple(draft.tokens[b, :count].tolist()),
        parents=tuple(draft.parent[b, :count].tolist()),
        accepted=tuple(node in kept for node in range(count)),
        source=tuple(_named(each, names) for each in bits),
    )


def _named(bits: int, names: Sequence[str]) -> str:
    if not bits:
        return "grammar"  # which forces it
    return "+".join(name for i, name in enumerate(names) if bits >> i & 1) or names[0]
