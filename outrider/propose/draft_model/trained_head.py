"""Trained drafts guess: chains as a draft model's, and trees (Li et al. 2024, EAGLE-2)."""

from __future__ import annotations

from dataclasses import replace

from outrider.cache.base import prompts_that_fit
from outrider.core import tree
from outrider.core.types import Batch, Draft, Needs, Round
from outrider.heads.targets.base import HeadTarget
from outrider.propose.base import ProposerSetup
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree import TreeProposer

_PILE = 1024  # states of a text that wait for the draft before it reads them although nobody asks for guesses
_PIECE = 512  # of them are read in one round at most


class _Informed(DraftModelProposer):
    """A draft model's proposer whose model reads the target's states, and so is told of every round."""

    _head: HeadTarget

    def _read_states_for(self, head: HeadTarget) -> None:
        self._head = head
        self.needs = Needs(layers=head.description.aux_states.layers)

    def propose(self, batch: Batch) -> Draft:
        relieve(self._head, batch)
        return super().propose(batch)

    def commit(self, round: Round) -> None:
        self._head.note(round)
        super().commit(round)


class HeadProposer(_Informed):
    """A chain of guesses from the target's states."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head)
        self._read_states_for(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, self._head.max_draft_tokens))


class HeadTreeProposer(_Informed, TreeProposer):
    """A tree of guesses from the target's states, as deep as the draft reaches."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head, reach=head.max_draft_tokens)
        self._read_states_for(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, max(batch.draft_budget)))


def relieve(head: HeadTarget, batch: Batch) -> None:
    """Let the draft read what has piled up of texts that it is not asked to go on with.

    A state takes as much memory as the target's own cache for a token or two, and the caches' share of memory does not
    count it. What is made of it does have its place there.
    """
    left, due = _PIECE, list[tuple[int, int, int]]()
    for b, row in enumerate(batch.seqs):
        start = head.cache.length(row.slot)
        stop = min(batch.start[b], start + left)  # the target has read as far, and the next feed is left to guess from
        if start < stop <= head.context and not batch.draft_budget[b] and head.piled(row.slot) >= _PILE:
            due.append((b, start, stop))
            left -= stop - start
    able = prompts_that_fit(head.cache, {}, {batch.seqs[b].slot: stop for b, _, stop in due})
    due = [each for each in due if batch.seqs[each[0]].slot in able]
    if due:
        ours = Batch(
            seqs=tuple(batch.seqs[b] for b, _, _ in due),
            start=tuple(start for _, start, _ in due),
            feed=tuple(tuple(batch.seqs[b].token_ids[start:stop]) for b, start, stop in due),
            draft_budget=(0,) * len(due),
        )
        none = tree.empty(len(due), head.device)
        head.cache.commit(tree.prefill_round(ours, none, head.score(ours, none)))


def within(batch: Batch, head: HeadTarget, reach: int) -> Batch:
    """No row with more guesses than `reach`, and none where the target has yet to read what led to the last token."""
    if (
        head.description.parallel_draft_tokens
    ):  # all guesses are made in one pass, so to do without the later ones spares nothing
        batch = replace(batch, min_draft_probs=())
    ready = (start and len(feed) == 1 for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(
        batch, draft_budget=tuple(min(b, reach) if r else 0 for b, r in zip(batch.draft_budget, ready, strict=True))
    )
