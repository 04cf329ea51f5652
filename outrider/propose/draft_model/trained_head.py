"""Proposers of draft heads: chains, and trees as in EAGLE-2 (Li et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from outrider.cache.base import prompts_that_fit
from outrider.core import tree
from outrider.core.types import Batch, Draft, Needs, Round
from outrider.heads.targets.base import HeadTarget
from outrider.propose.base import ProposerSetup
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree import TreeProposer

_PILE = 1024  # pending hidden states from which the head is fed without a draft
_PIECE = 512  # most of them that are fed in one round


class _Informed(DraftModelProposer):
    """Base of proposers whose model reads the hidden states of the target in every round."""

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
    """Drafts a chain from the hidden states of the target."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head)
        self._read_states_for(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, self._head.max_draft_tokens))


class HeadTreeProposer(_Informed, TreeProposer):
    """Drafts a tree from the hidden states of the target."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head, reach=head.max_draft_tokens)
        self._read_states_for(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, max(batch.draft_budget)))


def relieve(head: HeadTarget, batch: Batch) -> None:
    """Feed pending hidden states to the head, also for sequences that do not draft.

    A hidden state takes as much memory as the KV cache of one or two tokens, and is not part of the cache budget.
    """
    left, due = _PIECE, list[tuple[int, int, int]]()
    for b, row in enumerate(batch.seqs):
        start = head.cache.length(row.slot)
        stop = min(batch.start[b], start + left)  # the last state stays pending, because the next draft starts from it
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
    """Limit the budgets to `reach`; 0 for sequences whose last token has no hidden state yet."""
    if head.description.parallel_draft_tokens:  # all draft tokens come from one pass, so a shorter draft is not faster
        batch = replace(batch, min_draft_probs=())
    ready = (start and len(feed) == 1 for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(
        batch, draft_budget=tuple(min(b, reach) if r else 0 for b, r in zip(batch.draft_budget, ready, strict=True))
    )
