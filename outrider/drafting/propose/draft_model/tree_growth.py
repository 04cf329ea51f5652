"""The tree of one sequence while it grows, and the plan of its next level of sampled tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from outrider.core.types import SequenceState
from outrider.drafting.propose.draft_model.tree_acceptance import NUM_DEPTHS, NUM_RANKS, TreeAcceptance, odds_level
from outrider.drafting.propose.draft_model.tree_shapes import pruning_threshold
from outrider.drafting.propose.tree_builder import TreeBuilder

_MIN_MASS = 1e-4  # if less probability mass is left, sampling would return rounding errors
_ROOT = -1  # in place of a node
_PADDING = -2  # in place of a node


@dataclass(slots=True, kw_only=True, eq=False)
class TreeGrowth:
    """The tree of one sequence while it grows."""

    seq: SequenceState
    budget: int
    max_fed: int  # nodes for which the draft model's cache has memory
    sampled: bool
    # The tree. The acceptance probability of a node does not depend on its own token, so that a cut does not bias the
    # output.
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    prob: list[float] = field(default_factory=list)  # [N] acceptance probabilities with what the tokens tell
    kinds: list[tuple[Hashable, ...]] = field(default_factory=list)  # [N]
    fed: list[int] = field(default_factory=list)  # nodes fed to the draft model, padded to the longest of the batch
    fed_index: dict[int, int] = field(default_factory=lambda: {_ROOT: -1})  # index in `fed`, by node
    level: list[int] = field(default_factory=lambda: [_ROOT])  # the nodes fed last

    def add(self, token: int, parent: int, probs: tuple[float, float], kinds: tuple[Hashable, ...]) -> None:
        """Append a draft token. `probs` are its acceptance probabilities before its token is known, and after."""
        parent_prob = self.builder.accept_prob[parent] if parent >= 0 else 1.0
        self.builder.add(token, parent, min(probs[0], parent_prob))
        self.prob.append(probs[1])
        self.kinds.append(kinds)

    def prob_of(self, node: int) -> float:
        return self.prob[node] if node >= 0 else 1.0

    def depth_of(self, node: int) -> int:
        """Return the number of draft tokens on the path to a node, at most NUM_DEPTHS."""
        depth = 0
        while node >= 0 and depth < NUM_DEPTHS:
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


class LevelPlan:
    """Decides how many children the nodes fed last get, as in Sequoia. Children are sampled rank by rank."""

    def __init__(
        self, growth: TreeGrowth, acceptance: TreeAcceptance, peaks: Sequence[float], min_path_prob: float
    ) -> None:
        """Plan a level. `peaks` are the probabilities of the likeliest token after each node."""
        self._growth = growth
        self._acceptance = acceptance
        self._peaks = [odds_level(peak) for _, peak in zip(growth.level, peaks, strict=False)]
        self._probs = list(map(growth.prob_of, growth.level))
        self._depth = growth.depth_of(growth.level[0])
        self._mass = [1.0] * len(self._probs)  # probability mass that has not been sampled yet
        self._child_prob = list(self._probs)  # of the child sampled last; 0 if a node gets no more children
        expected = [
            prob * acceptance.by_peak(rank, self._depth, peak)
            for prob, peak in zip(self._probs, self._peaks, strict=True)
            for rank in range(NUM_RANKS)
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
            min(rank, NUM_RANKS - 1),
            self._depth,
            odds_level(mass / self._mass[at]),
            odds_level(self._mass[at]) // 2,
        )
        prob = self._probs[at] * self._acceptance.accept_prob(token_kind, self._expected(rank, at))
        self._growth.add(token, self._growth.level[at], (self._child_prob[at], prob), (*kinds, token_kind))
        self._mass[at] -= mass

    def _kinds(self, rank: int, at: int) -> tuple[Hashable, ...]:
        """Return the kinds of a child that do not depend on its token, coarser ones first."""
        rank = min(rank, NUM_RANKS - 1)
        peak = self._peaks[at]
        by_peak = ("peak", rank, self._depth, peak // 2 if rank else peak)
        by_mass = ("mass", rank, self._depth, peak // 2, odds_level(self._mass[at]) // 2)
        return (True, rank, self._depth), by_peak, by_mass

    def _expected(self, rank: int, at: int) -> float:
        """Return the acceptance probability of a child of this rank, given its earlier siblings."""
        by_peak = self._acceptance.by_peak(min(rank, NUM_RANKS - 1), self._depth, self._peaks[at])
        return self._acceptance.accept_prob(self._kinds(rank, at)[-1], by_peak) if rank else by_peak
