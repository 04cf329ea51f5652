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

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from outrider.core import tree
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target
from outrider.core.types import Batch, Draft, DraftKind, Draw, Packed, Round, StopRule
from outrider.drafting.propose.draft_model.chain import DraftModelProposer, fit_vocabulary
from outrider.drafting.propose.draft_model.tree_acceptance import NUM_DEPTHS, NUM_RANKS, TreeAcceptance, odds_level
from outrider.drafting.propose.draft_model.tree_growth import LevelPlan, TreeGrowth
from outrider.drafting.propose.draft_model.tree_shapes import pruning_threshold
from outrider.drafting.propose.tree_builder import TreeBuilder, build_draft
from outrider.verify.sampling import SamplingTensors, apply_sampling

_MAX_CHILDREN = 8  # of a node
_FED_PER_DRAFT_TOKEN = 8  # most nodes that the draft model is fed per draft token of the budget, with padding


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
        self._acceptance = TreeAcceptance()
        self._soft_sampling: SamplingTensors | None = None  # sampling parameters of the sequences, none of them greedy
        self._growths: list[TreeGrowth] = []  # of the sequences that the draft model runs
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
                self._acceptance.learn(growth.builder, growth.kinds, tokens)
        self._model.cache.commit(replace(round, batch=self._batch, draft=self._fed, path=tuple(paths)))

    def _propose(self, batch: Batch, indices: Sequence[int], num_seqs: int) -> Draft:
        self._growths = [
            TreeGrowth(
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
        self, growths: dict[int, TreeGrowth], distributions: torch.Tensor, min_path_prob: float
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
        self, growth: TreeGrowth, node: int, candidates: Iterable[tuple[float, int]], lowest: float
    ) -> None:
        """Add children of a node from (probability, token), while their acceptance probability exceeds `lowest`."""
        parent_prob = growth.prob_of(node)
        accept_prob = parent_prob
        for rank, (probability, token) in enumerate(candidates):
            by_rank = (False, min(rank, NUM_RANKS - 1), NUM_DEPTHS)
            by_prob = ("prob", rank, odds_level(probability))
            if probability > 0:
                accept_prob = min(parent_prob * self._acceptance.accept_prob(by_prob, probability), accept_prob)
            else:
                accept_prob = 0.0
            if accept_prob <= lowest:
                return
            growth.add(token, node, (accept_prob, accept_prob), (by_rank, by_prob))

    def _sample_children(
        self, growths: dict[int, TreeGrowth], distributions: torch.Tensor, uniform: torch.Tensor, min_path_prob: float
    ) -> None:
        """Sample children of the nodes fed last, without replacement, as many as planned."""
        if not growths:
            return
        peaks = distributions.amax(-1).tolist()
        plans = {b: LevelPlan(growth, self._acceptance, peaks[b], min_path_prob) for b, growth in growths.items()}
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

    def _next_level(self, growth: TreeGrowth, min_path_prob: float, min_level_prob: float) -> list[int]:
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
