"""Run draft heads as proposers: chains, and trees as in EAGLE-2 (Li et al. 2024)."""

from dataclasses import replace

from outrider.core import tree
from outrider.core.cache import prompts_that_fit
from outrider.core.proposer import ProposerSetup
from outrider.core.target import HiddenStateCache
from outrider.core.types import Batch, Draft, DraftBudget, Needs, Round
from outrider.drafting.propose.draft_model.chain import PREFILL_CHUNK, DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.models.heads.targets.base import HeadTarget

MAX_PENDING = 1024  # hidden states of a sequence that may be pending before the head is fed without drafting


class _HiddenStateProposer(DraftModelProposer):
    """Base of proposers whose model needs the target's hidden states of every round."""

    _head: HeadTarget

    def _use_hidden_states(self, head: HeadTarget) -> None:
        self._head = head
        self.needs = Needs(layers=head.description.aux_states.layers)

    def propose(self, batch: Batch) -> Draft:
        self._read_cached_states(batch)
        feed_pending(self._head, batch)
        return super().propose(batch)

    def commit(self, round: Round) -> None:
        self._head.hidden_states.record(round)
        super().commit(round)

    def _read_cached_states(self, batch: Batch) -> None:
        """Read the target's hidden states for sequences that start with a cached prefix."""
        head, target = self._head, self._setup.target
        for seq, start in zip(batch.seqs, batch.start, strict=True):
            if start and not head.hidden_states.has_states(seq.slot) and isinstance(target, HiddenStateCache):
                states = target.cached_hidden_states(seq.slot, self.needs.layers, start)
                head.hidden_states.set(seq.slot, states)


class HeadProposer(_HiddenStateProposer):
    """Drafts a chain from the hidden states of the target."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head)
        self._use_hidden_states(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(limit_budgets(batch, self._head, self._head.max_draft_tokens))


class HeadTreeProposer(_HiddenStateProposer, TreeProposer):
    """Drafts a tree from the hidden states of the target."""

    def __init__(self, setup: ProposerSetup, head: HeadTarget) -> None:
        super().__init__(setup, head, reach=head.max_draft_tokens)
        self._use_hidden_states(head)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(limit_budgets(batch, self._head, max(batch.draft_budget)))


def feed_pending(head: HeadTarget, batch: Batch) -> None:
    """Feed pending hidden states to the head for sequences that do not draft.

    A hidden state takes as much memory as the KV cache of one or two tokens, and is not part of the
    cache budget.
    """
    tokens_left = PREFILL_CHUNK
    due: list[tuple[int, int, int]] = []  # index in the batch, first and last + 1 token
    for b, seq in enumerate(batch.seqs):
        start = head.cache.length(seq.slot)
        # The last state stays pending, because the next draft starts from it.
        stop = min(batch.start[b], start + tokens_left)
        has_many = not batch.draft_budget[b] and head.hidden_states.num_pending(seq.slot) >= MAX_PENDING
        if start < stop <= head.context and has_many:
            due.append((b, start, stop))
            tokens_left -= stop - start
    fitting = prompts_that_fit(head.cache, {}, {batch.seqs[b].slot: stop for b, _, stop in due})
    due = [(b, start, stop) for b, start, stop in due if batch.seqs[b].slot in fitting]
    if due:
        head_batch = Batch(
            seqs=tuple(batch.seqs[b] for b, _, _ in due),
            start=tuple(start for _, start, _ in due),
            feed=tuple(tuple(batch.seqs[b].token_ids[start:stop]) for b, start, stop in due),
            budget=DraftBudget((0,) * len(due)),
        )
        none = tree.empty(len(due), head.device)
        head.cache.commit(tree.prefill_round(head_batch, none, head.score(head_batch, none)))


def limit_budgets(batch: Batch, head: HeadTarget, most: int) -> Batch:
    """Limit the draft budgets to `most` tokens, and to 0 for sequences whose last token has no hidden state yet."""
    if head.description.parallel_draft_tokens:
        # All draft tokens come from one pass, so a shorter draft is not faster.
        batch = replace(batch, budget=replace(batch.budget, min_draft_probs=()))
    budgets = []
    for budget, start, feed in zip(batch.draft_budget, batch.start, batch.feed, strict=True):
        has_state = start and len(feed) == 1
        budgets.append(min(budget, most) if has_state else 0)
    return batch.limited(tuple(budgets))
