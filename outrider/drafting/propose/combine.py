"""Combine proposers: `first`, `switch` and `merge`. `best` has a file of its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.types import Batch, Draft, DraftKind, Draw, Needs, Packed, Request, Round
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.tree_builder import TreeBuilder, depths
from outrider.errors import OutriderError
from outrider.verify.verdict import normalize

T = TypeVar("T")
_LEVELS = 8  # levels of the acceptance probability that a part estimates
PRIOR = 0.6  # prior acceptance if a part estimates none


def check_parts(count: int, *, switches: bool) -> None:
    """Check the number of parts, and that none of them is a switch.

    Raises:
        OutriderError: there are fewer than two parts, or one of them is a switch.
    """
    if count < 2:
        raise OutriderError("one proposer alone cannot be combined; name two or more, as in merge(ngram,recycle)")
    if switches:
        raise OutriderError("switch(...) cannot be a part of another proposer; make switch(...) the outermost one")


class Combination:
    """Base of combinations. All parts follow all requests."""

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        """Combine `parts`. Earlier parts have precedence."""
        check_parts(len(parts), switches=any(part.needs.alternatives > 1 for part in parts))
        self.parts = tuple(parts)
        layers = sorted({layer for part in parts for layer in part.needs.layers})
        self.needs = Needs(layers=tuple(layers))
        self._setup = setup
        # The first bit of each part in `Draft.source`, and the number of all bits.
        *self._first_bits, self.num_sources = accumulate(map(num_sources, self.parts), initial=0)

    def admit(self, slot: int, request: Request) -> None:
        for part in self.parts:
            part.admit(slot, request)

    def commit(self, round: Round) -> None:
        for part in self.parts:
            part.commit(round)

    def release(self, slot: int) -> None:
        for part in self.parts:
            part.release(slot)

    def _source(self, part: int, draft: Draft) -> tuple[tuple[int, ...], ...]:
        """Return the bits in `Draft.source` [B][width] for the draft tokens of a part."""
        first_bit = self._first_bits[part]
        if draft.source is None:
            return tuple((1 << first_bit,) * width for width in draft.width)
        sources = []
        for nodes in draft.source:
            sources.append(tuple(bits << first_bit for bits in nodes))
        return tuple(sources)


def num_sources(proposer: Proposer) -> int:
    """Return how many proposers a proposer combines, or 1. Each has a bit in `Draft.source` and a noise stream."""
    return int(getattr(proposer, "num_sources", 1))


class First(Combination):
    """Uses the draft of the first part that has one, for each sequence."""

    def propose(self, batch: Batch) -> Draft:
        remaining = batch  # without the budgets of sequences that have a draft
        drafts: list[Draft] = []
        for i, part in enumerate(self.parts):
            draft = part.propose(remaining)
            drafts.append(replace(draft, source=self._source(i, draft)))
            pairs = zip(remaining.draft_budget, draft.width, strict=True)
            remaining = remaining.limited(tuple(0 if width else budget for budget, width in pairs))
        return reduce(_first_nonempty, drafts)


class Switch(Combination):
    """Uses one part at a time. The planner chooses it, and a request can name another one."""

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        self.needs = replace(self.needs, alternatives=len(parts))

    def propose(self, batch: Batch) -> Draft:
        alternatives = batch.alternatives
        drafts = [part.propose(_only(batch, alternatives, i)) for i, part in enumerate(self.parts)]
        in_use = {*alternatives, batch.budget.alternative}
        drafts_in_use = [replace(draft, source=self._source(i, draft)) for i, draft in enumerate(drafts) if i in in_use]
        return reduce(_first_nonempty, drafts_in_use)


def _only(batch: Batch, alternatives: Sequence[int], alternative: int) -> Batch:
    """Return the batch with draft budgets for the sequences of one alternative only."""
    pairs = zip(batch.draft_budget, alternatives, strict=True)
    budget = tuple(count if used == alternative else 0 for count, used in pairs)
    return batch if budget == batch.draft_budget else batch.limited(budget)


class Merge(Combination):
    """Merges the drafts of all parts into one tree and keeps the likeliest nodes within the budget.

    Sampled draft tokens are all kept, because dropping one for its value would bias the output. The parts then share
    the budget equally, and sampled siblings come before one-hot ones, which may depend on them. Each part samples with
    its own noise stream, because verification of siblings assumes independent samples.
    """

    def __init__(self, setup: ProposerSetup, parts: Sequence[Proposer]) -> None:
        super().__init__(setup, parts)
        # By the parts that drafted a token and by the probability that they estimated.
        self._acceptance = AcceptanceEstimator()
        self._pending: list[Drafted] = []  # of this round

    def propose(self, batch: Batch) -> Draft:
        self._pending = []
        pairs = zip(batch.seqs, batch.draft_budget, strict=True)
        part_budget = tuple(self._part_budget(seq.request, budget) for seq, budget in pairs)
        drafts = []
        for part, first_bit in zip(self.parts, self._first_bits, strict=True):
            stream = batch.noise_stream + first_bit
            drafts.append(part.propose(replace(batch.limited(part_budget), noise_stream=stream)))
        trees = [self._host_trees(part, draft) for part, draft in enumerate(drafts)]
        unions = []
        for b, budget in enumerate(batch.draft_budget):
            union = self._union(b, [part_trees[b] for part_trees in trees])
            unions.append(union.best(budget))
        return _to_draft(unions, drafts, self._setup.device)

    def commit(self, round: Round) -> None:
        for drafted in self._pending:
            self._acceptance.learn(drafted.builder, drafted.kinds, round.emitted[drafted.b])
        super().commit(round)

    def _union(self, b: int, parts: Sequence[_PartTree]) -> _Union:
        """Return the merged tree of sequence b, with estimated acceptance probabilities."""
        union = _Union.of(parts)
        if any(union.kinds):
            return union
        estimated = union.builder.accept_prob  # by the parts, along the path
        kinds: list[Hashable] = []
        accept_prob: list[float] = []
        for node, parent in enumerate(union.builder.parent):
            given_parent = estimated[node]
            if parent >= 0 and estimated[parent]:
                given_parent = min(estimated[node] / estimated[parent], 1.0)
            kinds.append((union.source[node], round(given_parent * _LEVELS)))
            parent_prob = accept_prob[parent] if parent >= 0 else 1.0
            accept_prob.append(parent_prob * self._acceptance.accept_prob(kinds[-1], given_parent))
        builder = TreeBuilder(union.builder.tokens, union.builder.parent, accept_prob)
        self._pending.append(Drafted(b, builder, kinds))
        return _Union(builder, union.kinds, union.origin, union.source)

    def _part_budget(self, request: Request, budget: int) -> int:
        """Return the draft budget of each part for one sequence."""
        sampled = request.params.temperature > 0 and self._setup.draw is not Draw.ARGMAX
        return -(-budget // len(self.parts)) if sampled else budget

    def _host_trees(self, part: int, draft: Draft) -> list[_PartTree]:
        """Copy a part's draft to the host. Estimate acceptance if the part does not."""
        trees: list[_PartTree] = []
        all_tokens = draft.tokens.tolist()
        all_parents = draft.parent.tolist()
        all_kinds = draft.kind.tolist()
        source = self._source(part, draft)
        for b, count in enumerate(draft.count.tolist()):
            tokens = all_tokens[b][:count]
            parents = all_parents[b][:count]
            if draft.accept_prob is not None:
                builder = TreeBuilder(tokens, parents, list(draft.accept_prob[b][:count]))
            else:
                builder = self._estimate(b, part, tokens, parents)
            trees.append(_PartTree(builder, all_kinds[b], source[b]))
        return trees

    def _estimate(self, b: int, part: int, tokens: list[int], parents: list[int]) -> TreeBuilder:
        """Return a part's tree of sequence b with acceptance probabilities by depth."""
        builder, kinds = self._acceptance.by_depth(part, tokens, parents, prior=PRIOR)
        self._pending.append(Drafted(b, builder, kinds))
        return builder


class Drafted(NamedTuple):
    """A tree whose acceptance is learned from at commit."""

    b: int  # index of the sequence in the batch
    builder: TreeBuilder
    kinds: list[Hashable]


class _PartTree(NamedTuple):
    """The tree that a part has drafted for one sequence."""

    builder: TreeBuilder
    kinds: list[int]  # values of DraftKind, with padding
    source: Sequence[int]  # bits of `Draft.source`


@dataclass(frozen=True, slots=True)
class _Union:
    """The merged tree of a sequence, with the origin of each node."""

    builder: TreeBuilder
    kinds: list[int]  # values of DraftKind
    origin: list[tuple[int, int]]  # part, and node in the part's tree
    source: list[int]  # bits of `Draft.source`

    @classmethod
    def of(cls, parts: Sequence[_PartTree]) -> _Union:
        union = cls(TreeBuilder(), [], [], [])
        sampled_first = sorted(range(len(parts)), key=lambda part: not any(parts[part].kinds))
        for part in sampled_first:
            union._add(part, parts[part])
        return union

    def _add(self, part: int, part_tree: _PartTree) -> None:
        merged_nodes: list[int] = []  # by node of the part
        known = {pair: node for node, pair in enumerate(zip(self.builder.parent, self.builder.tokens, strict=True))}
        nodes = zip(part_tree.builder.tokens, part_tree.builder.parent, part_tree.builder.accept_prob, strict=True)
        for node, (token, part_parent, accept_prob) in enumerate(nodes):
            kind = part_tree.kinds[node]
            parent = merged_nodes[part_parent] if part_parent >= 0 else -1
            merged = None if kind else known.get((parent, token))
            if merged is None:
                merged = self.builder.add(token, parent, accept_prob)
                known[parent, token] = merged
                self.kinds.append(kind)
                self.origin.append((part, node))
                self.source.append(0)
            elif not self.kinds[merged]:  # the estimate for a sampled token must not depend on its value
                self.builder.accept_prob[merged] = max(self.builder.accept_prob[merged], accept_prob)
            self.source[merged] |= part_tree.source[node]
            merged_nodes.append(merged)

    def without_replacement(self) -> list[tuple[int, int]]:
        """Return the origins of nodes that were sampled without replacement."""
        pairs = zip(self.origin, self.kinds, strict=True)
        return [origin for origin, kind in pairs if kind == DraftKind.WITHOUT_REPLACEMENT]

    def earlier_siblings(self, node: int) -> list[int]:
        """Return the earlier siblings that the same part has sampled without replacement."""
        part, part_node = self.origin[node]
        siblings = []
        nodes = zip(self.origin, self.kinds, self.builder.parent, self.builder.tokens, strict=True)
        for (other_part, other_node), kind, parent, token in nodes:
            same_part = other_part == part and kind == DraftKind.WITHOUT_REPLACEMENT
            if same_part and other_node < part_node and parent == self.builder.parent[node]:
                siblings.append(token)
        return siblings

    def best(self, budget: int) -> _Union:
        """Return the sampled nodes and then the likeliest ones, parents before children."""
        estimates = self.builder.accept_prob
        nodes = range(len(estimates))
        order = sorted(nodes, key=lambda node: (self.kinds[node] == DraftKind.ONE_HOT, -estimates[node]))[:budget]
        selected = self.builder.select(order)
        # Acceptance probabilities must never rise from one node to the next.
        accept_prob = list(accumulate(selected.accept_prob, min))
        return _Union(
            TreeBuilder(selected.tokens, selected.parent, accept_prob),
            tree.pick(self.kinds, order),
            tree.pick(self.origin, order),
            tree.pick(self.source, order),
        )


def _to_draft(unions: Sequence[_Union], drafts: Sequence[Draft], device: torch.device) -> Draft:
    """Return the draft of the batch from the merged tree of each sequence."""
    width = tuple(len(union.kinds) for union in unions)
    size = max(width)
    if not size:
        return tree.empty(len(unions), device)

    builders = [union.builder for union in unions]
    parents = [builder.parent for builder in builders]
    q = None
    kinds = [union.kinds for union in unions]
    sampled = any(map(any, kinds))
    if sampled:
        q, kinds = _distributions(unions, drafts, size)
    return Draft(
        tokens=tree.upload_rows([builder.tokens for builder in builders], size, device),
        parent=tree.upload_rows(parents, size, device, -1),
        count=tree.upload(width, device),
        kind=tree.upload_rows(kinds, size, device, DraftKind.ONE_HOT),
        q=q,
        width=width,
        depth=tuple(max(depths(parent), default=0) for parent in parents),
        chain=False,
        accept_prob=None if sampled else tuple(tuple(builder.accept_prob) for builder in builders),
        source=tuple(tuple(union.source) for union in unions),
    )


def _distributions(unions: Sequence[_Union], drafts: Sequence[Draft], size: int) -> tuple[Packed, list[list[int]]]:
    """Return the distribution index [B, N] of each sampled node, and its `DraftKind`.

    WITHOUT_REPLACEMENT excludes all earlier siblings of that kind, of any part. If several parts sample without
    replacement, each node therefore gets the distribution that remained for its own part.
    """
    values, draft_indices = _join_distributions(drafts)
    part_indices = [index.tolist() for index in draft_indices]
    out = [[-1] * size for _ in unions]
    kinds = [list(union.kinds) for union in unions]
    remaining: list[torch.Tensor] = []
    for b, union in enumerate(unions):
        several = len({part for part, _ in union.without_replacement()}) > 1
        for node, ((part, part_node), kind) in enumerate(zip(union.origin, union.kinds, strict=True)):
            if kind:
                out[b][node] = part_indices[part][b][part_node]
            if several and kind == DraftKind.WITHOUT_REPLACEMENT:
                q = values[out[b][node]]
                rest = q.index_fill(0, tree.upload(union.earlier_siblings(node), q.device), 0.0)
                out[b][node] = len(values) + len(remaining)
                kinds[b][node] = DraftKind.SAMPLED
                remaining.append(normalize(rest, q))
    all_values = torch.cat([values, torch.stack(remaining)]) if remaining else values
    return Packed(values=all_values, at=tree.upload(out, values.device)), kinds


def _join_distributions(drafts: Sequence[Draft]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Join the distributions of all drafts to [T, V]. Return them and the indices [B, N] of each draft."""
    values = []
    indices = []
    count = 0
    for draft in drafts:
        index = torch.full_like(draft.tokens, -1)
        if draft.q is not None:
            index = torch.where(draft.q.at < 0, -1, draft.q.at + count)
            values.append(draft.q.values)
            count += len(draft.q.values)
        indices.append(index)
    return values[0] if len(values) == 1 else torch.cat(values), indices


def _first_nonempty(first: Draft, second: Draft) -> Draft:
    """Return for each sequence the first draft, or the second one if the first is empty."""
    return choose_drafts(first, second, list(map(bool, first.width)))


def choose_drafts(first: Draft, second: Draft, use_first: Sequence[bool]) -> Draft:
    """Return the first draft of the sequences that `use_first` [B] names, and the second draft of the others.

    An empty draft must not be chosen if the other one is not empty.
    """
    if not second.size:
        return first
    if not first.size:
        return second
    size = max(first.size, second.size)
    device = first.tokens.device
    a = _widened(first, size)
    b = _widened(second, size)
    choice = tree.upload(use_first, device, torch.bool)
    choice_of_nodes = choice[:, None]
    q = None
    if a.q is not None or b.q is not None:
        values, (a_index, b_index) = _join_distributions((a, b))
        q = Packed(values=values, at=torch.where(choice_of_nodes, a_index, b_index))
    return Draft(
        tokens=torch.where(choice_of_nodes, a.tokens, b.tokens),
        parent=torch.where(choice_of_nodes, a.parent, b.parent),
        count=torch.where(choice, a.count, b.count),
        kind=torch.where(choice_of_nodes, a.kind, b.kind),
        q=q,
        width=_choose_values(first.width, second.width, use_first),
        depth=_choose_values(first.depth, second.depth, use_first),
        chain=first.chain and second.chain,
        accept_prob=_choose_known(first.accept_prob, second.accept_prob, use_first),
        source=_choose_known(first.source, second.source, use_first),
    )


def _choose_known(
    first: Sequence[T] | None, second: Sequence[T] | None, use_first: Sequence[bool]
) -> tuple[T, ...] | None:
    """Return for each sequence its first or second value; None if the values of one draft are not known."""
    return None if first is None or second is None else _choose_values(first, second, use_first)


def _choose_values(first: Sequence[T], second: Sequence[T], use_first: Sequence[bool]) -> tuple[T, ...]:
    return tuple(x if use else y for x, y, use in zip(first, second, use_first, strict=True))


def _widened(draft: Draft, size: int) -> Draft:
    """Pad a draft to `size` nodes. The padding of a chain continues the chain."""
    more = size - draft.size
    if not more:
        return draft

    def pad(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        return functional.pad(values, (0, more), value=padding)

    more_parents = torch.arange(draft.size - 1, size - 1).to(draft.parent).expand(len(draft.parent), more)
    parent = torch.cat([draft.parent, more_parents], 1)
    q = None if draft.q is None else replace(draft.q, at=pad(draft.q.at, -1))
    return replace(draft, tokens=pad(draft.tokens), parent=parent, kind=pad(draft.kind), q=q)
