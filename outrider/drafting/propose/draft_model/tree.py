"""Draft trees with a draft model of the target's vocabulary, level by level.

Sampled siblings are drawn without replacement. Their number follows the objective of Sequoia (Chen
et al. 2024): the tree with the most expected accepted tokens. The plan is renewed at each level,
from the draft model's distributions, from the acceptance of earlier draft tokens of the same kind,
and from the average acceptance below a node. Whether a node is sampled depends on what was sampled
before, never on its own token or on later ones, so the output stays exact.

Without sampling, the likeliest paths are taken (Li et al. 2024, EAGLE-2). The same objective then
decides which nodes the draft model is fed next.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch

from outrider.core import tree
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target
from outrider.core.types import Batch, Draft, DraftKind, Draw, Packed, Round, SequenceState, StopRule
from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.draft_model.chain import DraftModelProposer, fit_vocabulary
from outrider.drafting.propose.draft_model.tree_shapes import best_first, pruning_threshold
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.verify.sampling import SamplingTensors, apply_sampling

_MAX_CHILDREN = 8  # of a node
_FED_PER_DRAFT_TOKEN = 8  # most nodes that the draft model is fed per draft token of the budget, with padding
_MIN_MASS = 1e-4  # if less probability mass is left, sampling would return rounding errors
_ODDS_LEVELS = 5  # levels of odds above 1, and as many below
_NUM_RANKS = 4  # ranks with their own statistics; later ones share the last
_NUM_DESCENDANTS = 32  # nodes below a node that a plan considers
_RANK_PRIORS = (0.55, 0.15, 0.06, 0.03)  # prior acceptance of a child, by rank
_NUM_DEPTHS = 2  # depths with their own statistics: a child of an accepted draft token is accepted more often
_PRIOR_WEIGHT = 30.0  # high, because a plan takes the best of many estimates and would prefer the overestimated ones
_DECAY = 0.998
_SECOND_CHILD_SHARE = 0.8  # prior acceptance of a second child, as a share of what the first one leaves
_ROOT = -1  # in place of a node
_PADDING = -2  # in place of a node


class _AcceptanceByRank:
    """Acceptance statistics of draft tokens. Each token is of several kinds, some coarser than others."""

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator(prior_weight=_PRIOR_WEIGHT, decay=_DECAY)
        self._descendants: dict[bool, tuple[float, ...]] = {}  # cache of `descendants`, until more is learned

    def accept_prob(self, kind: Hashable, prior: float) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is."""
        return self._acceptance.accept_prob(kind, prior)

    def by_rank(self, rank: int, *, sampled: bool) -> float:
        """Return the acceptance probability of any draft token of this rank that is not near the root."""
        return self.accept_prob((sampled, rank, _NUM_DEPTHS), _RANK_PRIORS[rank])

    def by_peak(self, rank: int, depth: int, peak: int) -> float:
        """Return that of a sampled token, from its rank, its depth and the odds level of the likeliest token in q.

        The prior of the first rank rises from 0.4 to 1 with the odds. From the third rank on, each
        rank has half of the rank before.
        """
        if rank > 1:
            prior = self.by_peak(rank - 1, depth, peak) / 2
        else:
            first = 0.4 + 0.6 / (1 + math.exp(-peak))
            prior = _SECOND_CHILD_SHARE * (1 - first) if rank else first
        return self.accept_prob(("peak", rank, depth, peak // 2 if rank else peak), prior)

    def descendants(self, *, sampled: bool) -> tuple[float, ...]:
        """Return the average acceptance probabilities of the nodes below an accepted node, likeliest first."""
        if sampled not in self._descendants:
            by_rank = sorted((self.by_rank(rank, sampled=sampled) for rank in range(_NUM_RANKS)), reverse=True)
            self._descendants[sampled] = best_first(lambda _: by_rank, _NUM_DESCENDANTS).accept_prob
        return self._descendants[sampled]

    def learn(self, growth: _TreeGrowth, emitted: Sequence[int]) -> None:
        for kinds in zip(*growth.kinds, strict=True):
            self._acceptance.learn(growth.builder, kinds, emitted)
        self._descendants = {}


@dataclass(slots=True, kw_only=True, eq=False)
class _TreeGrowth:
    """The tree of one sequence while it grows."""

    seq: SequenceState
    budget: int
    max_fed: int  # nodes for which the draft model's cache has memory
    sampled: bool
    # The tree. Its acceptance probabilities do not use the tokens of the nodes themselves.
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    prob: list[float] = field(default_factory=list)  # [N] acceptance probabilities that use the tokens
    kinds: list[tuple[Hashable, ...]] = field(default_factory=list)  # [N]
    fed: list[int] = field(default_factory=list)  # nodes fed to the draft model, padded to the longest of the batch
    fed_index: dict[int, int] = field(default_factory=lambda: {_ROOT: -1})  # index in `fed`, by node
    level: list[int] = field(default_factory=lambda: [_ROOT])  # the nodes fed last

    def add(self, token: int, parent: int, probs: tuple[float, float], kinds: tuple[Hashable, ...]) -> None:
        """Append a draft token with its acceptance probability without and with the use of its token."""
        parent_prob = self.builder.accept_prob[parent] if parent >= 0 else 1.0
        self.builder.add(token, parent, min(probs[0], parent_prob))
        self.prob.append(probs[1])
        self.kinds.append(kinds)

    def prob_of(self, node: int) -> float:
        return self.prob[node] if node >= 0 else 1.0

    def depth_of(self, node: int) -> int:
        """Return the number of draft tokens on the path to a node, at most _NUM_DEPTHS."""
        depth = 0
        while node >= 0 and depth < _NUM_DEPTHS:
            node = self.builder.parent[node]
            depth += 1
        return depth

    def budget_left(self) -> int:
        """Return the number of draft tokens that may still be sampled."""
        return self.budget - len(self.prob)

    def unfed(self) -> list[int]:
        """Return the nodes that may get children, likeliest first."""
        ends = self.seq.request.end_ids
        tokens = self.builder.tokens
        nodes = [node for node, token in enumerate(tokens) if node not in self.fed_index and token not in ends]
        return sorted(nodes, key=lambda node: -self.prob[node])

    def feed(self, level: Sequence[int], index: int) -> None:
        """Feed these nodes to the draft model next, from this index on."""
        self.level = list(level)
        self.fed += [*repeat(_PADDING, index - len(self.fed)), *level]
        self.fed_index |= {node: index + i for i, node in enumerate(level)}

    def fed_tree(self) -> TreeBuilder:
        """Return the tree of all nodes fed to the draft model, with padding."""
        fed_tree = TreeBuilder()
        for node in self.fed:
            if node == _PADDING:
                fed_tree.add(0, -1, 0.0)
            else:
                fed_tree.add(self.builder.tokens[node], self.fed_index[self.builder.parent[node]], 0.0)
        return fed_tree

    def best(self) -> tuple[TreeBuilder, list[int]]:
        """Return the likeliest draft tokens within the budget, and the index in `fed` of the parent of each."""
        accept_prob = self.builder.accept_prob
        nodes = sorted(range(len(accept_prob)), key=lambda node: (-accept_prob[node], node))[: self.budget]
        return self.builder.select(nodes), [self.fed_index[self.builder.parent[node]] for node in nodes]


class TreeProposer(DraftModelProposer):
    """Runs a draft model over its own KV cache, and drafts trees.

    Draft tokens are sampled from the draft model's distribution under the sampling parameters of
    the request. Without sampling, the likeliest tokens of that distribution are taken; a greedy
    sequence uses the distribution at temperature 1. Each level waits for the host.
    """

    def __init__(self, setup: ProposerSetup, model: Target, *, reach: int | None = None) -> None:
        """Draft with `model`, at most `reach` levels."""
        super().__init__(setup, model)
        self._reach = reach
        self._acceptance = _AcceptanceByRank()
        self._soft_sampling: SamplingTensors | None = None  # sampling parameters of the sequences, none of them greedy
        self._growths: list[_TreeGrowth] = []  # of the sequences that the draft model runs
        self._fed = tree.empty(1, setup.device)  # the draft tokens that the draft model was fed

    def commit(self, round: Round) -> None:
        if self._batch is None:
            return
        emitted = {seq.slot: tokens for seq, tokens in zip(round.batch.seqs, round.emitted, strict=True)}
        paths = []
        for growth in self._growths:
            tokens = emitted[growth.seq.slot]
            # The next pass must be fed at least one token, so the last one is not committed.
            path = growth.builder.path(tokens[:-1])
            paths.append(tuple(growth.fed_index[node] for node in path if node in growth.fed_index))
            # Sampled tokens that were cut from the draft were not verified, so nothing is learned
            # from them.
            if round.draft.size or not growth.sampled:
                self._acceptance.learn(growth, tokens)
        self._model.cache.commit(replace(round, batch=self._batch, draft=self._fed, path=tuple(paths)))

    def _propose(self, batch: Batch, indices: Sequence[int], num_seqs: int) -> Draft:
        self._growths = [
            _TreeGrowth(
                seq=seq,
                budget=budget,
                max_fed=min(self._room(seq.slot, len(seq.token_ids)), self._num_fed(budget)),
                sampled=self._setup.draw is Draw.SAMPLE and seq.request.params.temperature > 0,
            )
            for seq, budget in zip(batch.seqs, batch.draft_budget, strict=True)
        ]
        return self._build(self._grow_trees(batch), indices, num_seqs)

    def _num_fed(self, budget: int) -> int:
        return _FED_PER_DRAFT_TOKEN * budget

    def _grow_trees(self, batch: Batch) -> torch.Tensor:
        """Grow the trees of all sequences.

        Returns:
            [B, 1 + F, V], the draft model's distributions after the committed text and after each
            fed node.
        """
        sampling = self._sampling.of(batch.seqs)
        not_greedy = torch.zeros_like(sampling.greedy)
        self._soft_sampling = replace(sampling, greedy=not_greedy, all_greedy=False, sampled=(True,) * len(batch.seqs))
        uniform = self._sampling.noise(batch.seqs).uniforms(max(batch.draft_budget), batch.noise_stream)
        stop_rule = StopRule(weight=(), bias=(), min_draft_probs=batch.budget.min_draft_probs)
        self._fed = tree.empty(len(batch.seqs), self._setup.device)
        distributions = [self._distributions(batch, -1)]
        growing = {b: growth for b, growth in enumerate(self._growths) if growth.budget}
        least = batch.budget.min_path_prob
        while growing:
            greedy = {b: growth for b, growth in growing.items() if not growth.sampled}
            sampled = {b: growth for b, growth in growing.items() if growth.sampled}
            self._add_likeliest_children(greedy, distributions[-1], least)
            self._sample_children(sampled, distributions[-1], uniform, least)
            min_level_prob = stop_rule.threshold(len(growing))
            first = self._fed.size
            levels = {b: self._next_level(growth, least, min_level_prob) for b, growth in growing.items()}
            growing = {b: growth for b, growth in growing.items() if levels[b] and len(distributions) != self._reach}
            for b, growth in growing.items():
                growth.feed(levels[b], first)
            if growing:
                self._fed = build_draft([growth.fed_tree() for growth in self._growths], self._setup.device)
                distributions.append(self._distributions(batch, first))
        return torch.cat(distributions, 1)

    def _distributions(self, batch: Batch, first: int) -> torch.Tensor:
        """Return the draft model's distributions [B, M, V] after the fed nodes from `first` on.

        If `first` is negative, return those after the committed text.
        """
        assert self._soft_sampling is not None
        logits = fit_vocabulary(self._model.score(batch, self._fed, first).logits, self._setup.vocab)
        if first < 0 or not (self._soft_sampling.any_penalty or self._soft_sampling.any_minimum):
            return apply_sampling(logits, self._soft_sampling, self._fed, last=True)
        # Penalties depend on the path to a node, so the logits must cover all nodes.
        all_logits = torch.cat([logits.new_zeros(len(logits), 1 + first, logits.shape[-1]), logits], 1)
        return apply_sampling(all_logits, self._soft_sampling, self._fed)[:, 1 + first :]

    def _add_likeliest_children(
        self, growths: dict[int, _TreeGrowth], distributions: torch.Tensor, min_path_prob: float
    ) -> None:
        """Add the likeliest children of the nodes fed last."""
        if not growths:
            return
        best = distributions[list(growths)].topk(min(_MAX_CHILDREN, distributions.shape[-1]))
        host = zip(growths.values(), best.values.tolist(), best.indices.tolist(), strict=True)
        for growth, level_probs, level_ids in host:
            known = sorted(growth.builder.accept_prob, reverse=True)
            lowest = max(min_path_prob, known[growth.budget - 1] if len(known) >= growth.budget else 0.0)
            for node, probs, ids in zip(growth.level, level_probs, level_ids, strict=False):
                self._add_children(growth, node, zip(probs, ids, strict=True), lowest)

    def _add_children(
        self, growth: _TreeGrowth, node: int, candidates: Iterable[tuple[float, int]], lowest: float
    ) -> None:
        """Add children of a node from (probability, token), while their acceptance probability exceeds `lowest`."""
        parent_prob = growth.prob_of(node)
        accept_prob = parent_prob
        for rank, (probability, token) in enumerate(candidates):
            by_rank = (False, min(rank, _NUM_RANKS - 1), _NUM_DEPTHS)
            by_prob = ("prob", rank, _odds_level(probability))
            if probability > 0:
                accept_prob = min(parent_prob * self._acceptance.accept_prob(by_prob, probability), accept_prob)
            else:
                accept_prob = 0.0
            if accept_prob <= lowest:
                return
            growth.add(token, node, (accept_prob, accept_prob), (by_rank, by_prob))

    def _sample_children(
        self, growths: dict[int, _TreeGrowth], distributions: torch.Tensor, uniform: torch.Tensor, min_path_prob: float
    ) -> None:
        """Sample children of the nodes fed last, without replacement, as many as planned."""
        if not growths:
            return
        peaks = distributions.amax(-1).tolist()
        plans = {b: _LevelPlan(growth, self._acceptance, peaks[b], min_path_prob) for b, growth in growths.items()}
        remaining = distributions.clone()
        for rank in range(_MAX_CHILDREN):
            # Sequence, index in its level, and node of the new child.
            chosen = [(b, at, node) for b, plan in plans.items() for at, node in plan.next(rank)]
            if not chosen:
                return
            seq, at, node = tree.upload(chosen, distributions.device).unbind(1)
            q = remaining[seq, at]
            tokens = self._inverse_cdf(q, uniform[seq, node])
            masses = q.gather(1, tokens[:, None])[:, 0]
            remaining[seq, at, tokens] = 0.0
            for (b, index, _), token, mass in zip(chosen, tokens.tolist(), masses.tolist(), strict=True):
                plans[b].add_child(rank, index, token, mass)

    def _next_level(self, growth: _TreeGrowth, min_path_prob: float, min_level_prob: float) -> list[int]:
        """Return the nodes to feed to the draft model next; [] if the tree is complete."""
        unfed = growth.unfed()
        descendants = self._acceptance.descendants(sampled=growth.sampled)
        probs = [growth.prob[node] for node in unfed]
        if growth.sampled:
            # Sampled tokens stay in the tree, however unlikely they turn out to be.
            room = growth.budget_left()
            best_child = 1.0
            first_children = (prob * share for prob in probs for share in descendants[:1])
            threshold = pruning_threshold((), first_children, descendants, room) if room > 0 else 2.0
        else:
            room = growth.budget
            best_child = descendants[0]
            candidates = set(unfed)
            final = (prob for node, prob in enumerate(growth.prob) if node not in candidates)
            threshold = pruning_threshold(final, probs, descendants, room)
        room = min(room, growth.max_fed - len(growth.fed))
        least = max(threshold, min_path_prob)
        level = [node for node, prob in zip(unfed, probs, strict=True) if prob * best_child >= least]
        level = level[: max(room, 0)]
        return level if sum(growth.prob[node] for node in level) >= min_level_prob else []

    def _build(self, distributions: torch.Tensor, indices: Sequence[int], num_seqs: int) -> Draft:
        """Return the draft of all sequences. Those that are not in `indices` have no draft."""
        builders = [TreeBuilder() for _ in range(num_seqs)]
        # Sequence, node, sequence of the draft model, and index of the node's distribution.
        sampled_nodes: list[tuple[int, int, int, int]] = []
        for draft_index, (b, growth) in enumerate(zip(indices, self._growths, strict=True)):
            builders[b], parent_fed_indices = growth.best()
            if growth.sampled:
                sampled_nodes += [(b, node, draft_index, at + 1) for node, at in enumerate(parent_fed_indices)]
        draft = build_draft(builders, self._setup.device)
        if not sampled_nodes:
            return draft
        seq, node, draft_seq, at = tree.upload(sampled_nodes, distributions.device).unbind(1)
        index = torch.full_like(draft.tokens, -1).index_put((seq, node), draft_seq * distributions.shape[1] + at)
        sampled_kind = torch.tensor(int(DraftKind.WITHOUT_REPLACEMENT), device=distributions.device)
        kind = draft.kind.index_put((seq, node), sampled_kind)
        return replace(draft, kind=kind, q=Packed(values=distributions.flatten(0, 1), at=index))


class _LevelPlan:
    """Decides how many children the nodes fed last get, as in Sequoia. Children are sampled rank by rank."""

    def __init__(
        self, growth: _TreeGrowth, acceptance: _AcceptanceByRank, peaks: Sequence[float], min_path_prob: float
    ) -> None:
        """Plan a level. `peaks` are the probabilities of the likeliest token after each node."""
        self._growth = growth
        self._acceptance = acceptance
        self._peaks = [_odds_level(peak) for _, peak in zip(growth.level, peaks, strict=False)]
        self._probs = list(map(growth.prob_of, growth.level))
        self._depth = growth.depth_of(growth.level[0])
        self._mass = [1.0] * len(self._probs)  # probability mass that has not been sampled yet
        self._child_prob = list(self._probs)  # of the child sampled last; 0 if a node gets no more children
        expected = [
            prob * acceptance.by_peak(rank, self._depth, peak)
            for prob, peak in zip(self._probs, self._peaks, strict=True)
            for rank in range(_NUM_RANKS)
        ]
        threshold = pruning_threshold((), expected, acceptance.descendants(sampled=True), growth.budget_left())
        self._least = max(min_path_prob, threshold)

    def next(self, rank: int) -> list[tuple[int, int]]:
        """Return which nodes get a child of this rank: the index in the level, and the node that the child will be."""
        for at, prob in enumerate(self._probs):
            child_prob = min(prob * self._expected(rank, at), self._child_prob[at])
            likely = child_prob >= self._least and self._mass[at] > _MIN_MASS
            self._child_prob[at] = child_prob if likely else 0.0
        order = sorted(range(len(self._probs)), key=lambda at: -self._child_prob[at])
        order = [at for at in order if self._child_prob[at] > 0]
        budget_left = self._growth.budget_left()
        for at in order[budget_left:]:
            self._child_prob[at] = 0.0
        first_node = len(self._growth.prob)
        return [(at, first_node + i) for i, at in enumerate(order[:budget_left])]

    def add_child(self, rank: int, at: int, token: int, mass: float) -> None:
        """Add the child of this rank with the sampled `token`, whose probability is `mass`."""
        kinds = self._kinds(rank, at)
        token_kind = (
            "token",
            min(rank, _NUM_RANKS - 1),
            self._depth,
            _odds_level(mass / self._mass[at]),
            _odds_level(self._mass[at]) // 2,
        )
        prob = self._probs[at] * self._acceptance.accept_prob(token_kind, self._expected(rank, at))
        self._growth.add(token, self._growth.level[at], (self._child_prob[at], prob), (*kinds, token_kind))
        self._mass[at] -= mass

    def _kinds(self, rank: int, at: int) -> tuple[Hashable, ...]:
        """Return the kinds of a child that do not depend on its token, coarser ones first."""
        rank = min(rank, _NUM_RANKS - 1)
        peak = self._peaks[at]
        by_peak = ("peak", rank, self._depth, peak // 2 if rank else peak)
        by_mass = ("mass", rank, self._depth, peak // 2, _odds_level(self._mass[at]) // 2)
        return (True, rank, self._depth), by_peak, by_mass

    def _expected(self, rank: int, at: int) -> float:
        """Return the acceptance probability of a child of this rank, given its earlier siblings."""
        by_peak = self._acceptance.by_peak(min(rank, _NUM_RANKS - 1), self._depth, self._peaks[at])
        return self._acceptance.accept_prob(self._kinds(rank, at)[-1], by_peak) if rank else by_peak


def _odds_level(probability: float) -> int:
    """Return the natural logarithm of the odds, rounded and limited."""
    log_odds = math.log(max(probability, 1e-6) / max(1 - probability, 1e-6))
    return round(min(max(log_odds, -_ODDS_LEVELS), _ODDS_LEVELS))
