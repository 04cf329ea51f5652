"""The drafts of a round, for streams that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.types import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDrafts:
    """The draft of one sequence in one round, parents before children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1: the last token before the round
    accepted: tuple[bool, ...]
    source: tuple[str, ...]  # names of the proposers


def drafts_of(round: Round, b: int, names: Sequence[str]) -> RoundDrafts:
    """Return the draft of sequence b. `names` are the names of the bits of `Draft.source`."""
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
        return "grammar"  # forced by the grammar
    return "+".join(name for i, name in enumerate(names) if bits >> i & 1) or names[0]
