"""Token recycling: draft tokens that the target's earlier logits found likely (Luo et al. 2024).

A pass scores every draft token, accepted or not, and so shows for free what may follow it. This is
stored under the last tokens of the draft token's path, and a tree grows from it, likeliest node
first. The paper's table has single tokens, fills a fixed tree, and is kept between requests. This
one prefers longer suffixes, also uses the prompt, uses the successors of similar tokens for unknown
ones, and learns acceptance probabilities. Sequences share only these probabilities.
"""

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

import torch

from outrider.core import tree
from outrider.core.proposer import ProposerSetup
from outrider.core.types import Batch, Draft, Needs, Request, Round, SequenceState
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.lookup.successors import MAX_SUFFIX, NUM_SUCCESSORS, Successors, SuccessorTable, prior
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft


class RecycleProposer:
    """Grows a tree, likeliest node first, from what the target's logits have shown after the same suffixes.

    A prompt is added in the rounds in which the target prefills it, so that a long prompt does not
    delay sequences that decode.
    """

    needs = Needs()

    def __init__(self, setup: ProposerSetup) -> None:
        self._device = setup.device
        self.tables: dict[int, SuccessorTable] = {}  # by slot
        self._acceptance = AcceptanceEstimator()
        self._accept_probs: dict[int, float] = {}  # cache of `accept_prob`, until more is learned
        self._drafted: dict[int, tuple[TreeBuilder, list[Hashable]]] = {}  # by slot: tree and kinds of this round

    def admit(self, slot: int, request: Request) -> None:
        self.tables[slot] = SuccessorTable(len(request.prompt_token_ids))

    def propose(self, batch: Batch) -> Draft:
        self._drafted = {}
        for seq, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True):
            self.tables[seq.slot].add_prompt(seq.token_ids, start + len(feed))
        builders = [
            self._draft_tree(seq, budget, batch.budget.min_path_prob)
            for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        return build_draft(builders, self._device)

    def commit(self, round: Round) -> None:
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if seq.slot in self._drafted:
                self._acceptance.learn(*self._drafted[seq.slot], emitted)
            self.tables[seq.slot].add_output(emitted)
        self._accept_probs = {}
        self._store_successors(round)

    def release(self, slot: int) -> None:
        self.tables.pop(slot, None)

    def _draft_tree(self, seq: SequenceState, budget: int, min_path_prob: float) -> TreeBuilder:
        builder = TreeBuilder()
        kinds: list[Hashable] = []
        self._drafted[seq.slot] = builder, kinds
        if not budget:
            return builder
        table = self.tables[seq.slot]
        order = count()
        # The best remaining candidate below each node: minus its probability, order, token, kind, and parent.
        queue: list[tuple[float, int, int, int, _Parent]] = []

        def push_next(parent: _Parent, most: float) -> None:
            token, kind = next(parent.candidates, (-1, -1))
            if kind >= 0:
                accept_prob = min(parent.accept_prob * self.accept_prob(kind), most)
                heappush(queue, (-accept_prob, next(order), token, kind, parent))

        suffix = tuple(seq.token_ids[-MAX_SUFFIX - 1 :])
        push_next(_Parent(-1, 1.0, suffix, table.candidates(suffix)), 1.0)
        while queue and len(kinds) < budget and -queue[0][0] >= min_path_prob:
            negative_prob, _, token, kind, parent = heappop(queue)
            accept_prob = -negative_prob
            node = builder.add(token, parent.node, accept_prob)
            kinds.append(kind)
            push_next(parent, accept_prob)
            if len(kinds) < budget:
                suffix = (*parent.suffix[-MAX_SUFFIX:], token)
                push_next(_Parent(node, accept_prob, suffix, table.candidates(suffix)), accept_prob)
        return builder

    def accept_prob(self, kind: int) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is."""
        accept_prob = self._accept_probs.get(kind)
        if accept_prob is None:
            accept_prob = self._accept_probs[kind] = self._acceptance.accept_prob(kind, prior(kind))
        return accept_prob

    def _store_successors(self, round: Round) -> None:
        """Store what may follow each scored node. Needs one copy from the device."""
        size = 1 + round.draft.size
        seqs = [b for b, emitted in enumerate(round.emitted) if emitted]
        nodes = [b * size + node for b in seqs for node in range(1 + round.draft.width[b])]
        if not nodes:
            return
        logits = round.scores.logits.flatten(0, 1)
        if len(nodes) < len(logits):
            logits = logits[tree.upload(nodes, logits.device)]
        best, ids = logits.topk(min(NUM_SUCCESSORS, logits.shape[1]))
        # Ids are far below 2**24, so float32 holds them exactly.
        tensors = (best, ids, round.draft.tokens, round.draft.parent)
        host = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
        best_logits, float_ids, float_tokens, float_parents = (list(islice(host, part.numel())) for part in tensors)
        successors = list(map(int, float_ids))
        tokens = list(map(int, float_tokens))
        parents = list(map(int, float_parents))
        num_successors = ids.shape[1]
        begins = iter(range(0, len(best_logits), num_successors))
        for b in seqs:
            seq = round.batch.seqs[b]
            first = b * (size - 1)
            suffixes = [tuple(seq.token_ids[-MAX_SUFFIX:])]
            for node in range(first, first + round.draft.width[b]):
                suffixes.append((*suffixes[parents[node] + 1][1 - MAX_SUFFIX :], tokens[node]))
            for suffix, begin in zip(suffixes, begins, strict=False):
                end = begin + num_successors
                self.tables[seq.slot].put(suffix, Successors(successors[begin:end], best_logits[begin:end]))


class _Parent(NamedTuple):
    """A node of a growing tree that may get more children."""

    node: int
    accept_prob: float
    suffix: tuple[int, ...]
    candidates: Iterator[tuple[int, int]]  # tokens and kinds that have not been tried yet
