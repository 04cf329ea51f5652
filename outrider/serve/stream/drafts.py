"""Collects the drafts of a round for streams that show them."""

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
    source_bits = [1] * count if draft.source is None else draft.source[b][:count]
    accepted_nodes = frozenset(round.path[b])
    return RoundDrafts(
        tokens=tuple(draft.tokens[b, :count].tolist()),
        parents=tuple(draft.parent[b, :count].tolist()),
        accepted=tuple(node in accepted_nodes for node in range(count)),
        source=tuple(_source_name(bits, names) for bits in source_bits),
    )


def _source_name(bits: int, names: Sequence[str]) -> str:
    """Return the names of the proposers whose bits are set, joined by "+"."""
    if not bits:
        return "grammar"  # forced by the grammar
    return "+".join(name for i, name in enumerate(names) if bits >> i & 1) or names[0]
