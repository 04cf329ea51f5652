"""Drafts that are compared with the text that follows, instead of being verified.

During plain decoding, a proposer without a draft model drafts in a round now and then. The draft
costs almost nothing, and is dropped. The tokens of the next rounds tell how many of its tokens
would have been accepted: an exact rule accepts a draft token that was not sampled with the
probability that the target samples this token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.stats import Stats
from outrider.core.types import Batch, Draft, SequenceState
from outrider.drafting.plan.proposer_stats import Outcome


class _Expected(NamedTuple):
    """The draft of one sequence."""

    seq: SequenceState
    length: int  # committed tokens when it was drafted
    tokens: list[int]
    parents: list[int]  # -1: the last committed token
    depth: int  # of the longest path


class UnverifiedDrafts:
    """The drafts of one round."""

    def __init__(self, alternative: int, batch: Batch, draft: Draft) -> None:
        """Keep the drafts of this alternative of the proposer. No draft token may have been sampled."""
        self.alternative = alternative
        self._expected: list[_Expected] = []
        parents = draft.parent.tolist()
        for b, (seq, emits) in enumerate(zip(batch.seqs, batch.emits, strict=True)):
            if emits and batch.draft_budget[b]:
                tokens = draft.host_tokens()[b][: draft.width[b]]
                self._expected.append(_Expected(seq, len(seq.token_ids), tokens, parents[b], draft.depth[b]))

    def outcome(self) -> Outcome | None:
        """Return what a verification would have done. None if no text is long enough by now."""
        passes = []
        nodes = 0
        depth = 0
        for expected in self._expected:
            text = expected.seq.token_ids[expected.length :]
            if len(text) <= expected.depth and not expected.seq.finish_reason:
                continue
            accepted = _accepted(expected.tokens, expected.parents, text)
            passes.append((expected.depth, accepted, accepted + 1))
            nodes += len(expected.tokens)
            depth = max(depth, expected.depth)
        if not passes:
            return None
        stats = Stats.of_passes(passes, drafted=nodes)
        return Outcome(
            rounds=1,
            seqs=len(passes),
            output_tokens=stats.output_tokens,
            nodes=nodes,
            reached=stats.reached,
            accepted=stats.accepted,
            depth=depth,
            draft_seconds=None,
        )


def _accepted(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    """Return how many tokens of a text follow a path of a tree from its root."""
    node = -1
    accepted = 0
    for token in text:
        children = (child for child, drafted in enumerate(tokens) if parents[child] == node and drafted == token)
        node = next(children, -2)
        if node < 0:
            break
        accepted += 1
    return accepted
