"""How likely a draft token of a tree is accepted, from the acceptance of earlier ones of the same kind."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from outrider.drafting.propose.acceptance import AcceptanceEstimator
from outrider.drafting.propose.draft_model.tree_shapes import best_first
from outrider.drafting.propose.tree_builder import TreeBuilder

_ODDS_LEVELS = 5  # levels of odds above 1, and as many below
NUM_RANKS = 4  # ranks with their own statistics; later ones share the last
NUM_DEPTHS = 2  # depths with their own statistics: a child of an accepted draft token is accepted more often
_NUM_DESCENDANTS = 32  # nodes below a node that a plan considers
_RANK_PRIORS = (0.55, 0.15, 0.06, 0.03)  # prior acceptance of a child, by rank
_SECOND_CHILD_SHARE = 0.8  # prior acceptance of a second child, as a share of what the first one leaves
_PRIOR_WEIGHT = 30.0  # high, because a plan takes the best of many estimates and would prefer the overestimated ones
_DECAY = 0.998


class TreeAcceptance:
    """Acceptance statistics of the draft tokens of trees.

    Each token is of several kinds, such as its rank among its siblings. Some kinds are coarser than others.
    """

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator(prior_weight=_PRIOR_WEIGHT, decay=_DECAY)
        self._descendants: dict[bool, tuple[float, ...]] = {}  # cache of `descendants`, until more is learned

    def accept_prob(self, kind: Hashable, prior: float) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is."""
        return self._acceptance.accept_prob(kind, prior)

    def by_rank(self, rank: int, *, sampled: bool) -> float:
        """Return the acceptance probability of any draft token of this rank that is not near the root."""
        return self.accept_prob((sampled, rank, NUM_DEPTHS), _RANK_PRIORS[rank])

    def by_peak(self, rank: int, depth: int, peak: int) -> float:
        """Return the acceptance probability of a sampled token, by its rank, its depth, and the `peak`.

        The peak is the odds level of the likeliest token in q. The prior of the first rank rises from 0.4 to 1 with
        it. From the third rank on, each rank has half of the prior of the rank before.
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
            by_rank = sorted((self.by_rank(rank, sampled=sampled) for rank in range(NUM_RANKS)), reverse=True)
            self._descendants[sampled] = best_first(lambda _: by_rank, _NUM_DESCENDANTS).accept_prob
        return self._descendants[sampled]

    def learn(self, builder: TreeBuilder, kinds: Sequence[tuple[Hashable, ...]], emitted: Sequence[int]) -> None:
        """Learn from a tree whose nodes are of these `kinds` [N], after the tokens `emitted` were committed."""
        for of_nodes in zip(*kinds, strict=True):
            self._acceptance.learn(builder, of_nodes, emitted)
        self._descendants = {}


def odds_level(probability: float) -> int:
    """Return the natural logarithm of the odds, rounded and limited."""
    log_odds = math.log(max(probability, 1e-6) / max(1 - probability, 1e-6))
    return round(min(max(log_odds, -_ODDS_LEVELS), _ODDS_LEVELS))
