"""Estimate how often draft tokens of a kind are accepted, from past rounds."""

from collections.abc import Hashable, Iterator, Sequence

from outrider.drafting.propose.tree_builder import TreeBuilder, depths

MIN_ACCEPT_PROB = 0.02  # draft tokens with a lower estimated acceptance are left out
_PRIOR_WEIGHT = 4.0  # weight of the prior, in draft tokens
_DECAY = 0.99  # of the counts of a kind, with each further draft token of the kind
_TEXT_WEIGHT = 4.0  # weight of the estimates against the draft tokens of a text, in draft tokens
_TEXT_DECAY = 0.95  # of the sums of a text, per draft


class AcceptanceEstimator:
    """Keeps decayed acceptance counts by kind of draft token. Only tokens whose ancestors were accepted count.

    A kind is what distinguishes good draft tokens from bad ones, such as the length of a match or a
    rank. The number of kinds must be bounded.
    """

    def __init__(self, *, prior_weight: float = _PRIOR_WEIGHT, decay: float = _DECAY) -> None:
        """Count the prior as `prior_weight` draft tokens. Counts decay by `decay` with each further draft token."""
        self._prior_weight = prior_weight
        self._decay = decay
        self._counts: dict[Hashable, tuple[float, float]] = {}  # verified, accepted

    def accept_prob(self, kind: Hashable, prior: float) -> float:
        """Return the probability that a draft token of this kind is accepted if its parent is.

        Without observations it is `prior`.
        """
        verified, accepted = self._counts.get(kind, (0.0, 0.0))
        return (accepted + self._prior_weight * prior) / (verified + self._prior_weight)

    def by_depth(
        self, part: int, tokens: Sequence[int], parents: Sequence[int], *, prior: float
    ) -> tuple[TreeBuilder, list[Hashable]]:
        """Estimate the tree of a proposer that estimates nothing itself, from the acceptance at each depth.

        Returns:
            The tree with the acceptance probabilities of its paths, and the kinds of its nodes, for `learn`.
        """
        kinds: list[Hashable] = [(part, depth) for depth in depths(parents)]
        accept_prob: list[float] = []
        for kind, parent in zip(kinds, parents, strict=True):
            parent_prob = accept_prob[parent] if parent >= 0 else 1.0
            accept_prob.append(self.accept_prob(kind, prior) * parent_prob)
        return TreeBuilder(list(tokens), list(parents), accept_prob), kinds

    def learn(self, drafted: TreeBuilder, kinds: Sequence[Hashable], emitted: Sequence[int]) -> None:
        """Learn from the draft of a sequence, with `kinds` [N], after the tokens `emitted` were committed."""
        for node, is_accepted in judged_nodes(drafted, emitted):
            verified, accepted = self._counts.get(kinds[node], (0.0, 0.0))
            self._counts[kinds[node]] = verified * self._decay + 1, accepted * self._decay + is_accepted


class TextAcceptance:
    """The acceptance of draft tokens in one text, relative to their estimates, which are means over all texts.

    Lookups that pay in most texts may fail in one. Its own draft tokens tell after a few of them.
    """

    def __init__(self) -> None:
        self._estimated = 0.0  # decayed sums over draft tokens whose ancestors were accepted
        self._accepted = 0.0

    @property
    def factor(self) -> float:
        """The accepted tokens relative to the estimated ones, at most 1: a few tokens do not raise estimates."""
        return min((self._accepted + _TEXT_WEIGHT) / (self._estimated + _TEXT_WEIGHT), 1.0)

    def learn(self, drafted: TreeBuilder, emitted: Sequence[int]) -> None:
        """Learn from a draft that was estimated with `factor`, after the tokens `emitted` were committed."""
        factor = self.factor
        self._estimated *= _TEXT_DECAY
        self._accepted *= _TEXT_DECAY
        for node, is_accepted in judged_nodes(drafted, emitted):
            parent = drafted.parent[node]
            parent_prob = drafted.accept_prob[parent] if parent >= 0 else 1.0
            self._estimated += min(drafted.accept_prob[node] / parent_prob / factor, 1.0)
            self._accepted += is_accepted


def judged_nodes(drafted: TreeBuilder, emitted: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the nodes whose ancestors were accepted, and whether each was, after `emitted` was committed."""
    if not emitted:
        return
    path = drafted.path(emitted)
    accepted_nodes = {-1, *path}
    for node, parent in enumerate(drafted.parent):
        # Nothing is known about the children of the last emitted token.
        if parent in accepted_nodes and (parent < 0 or parent != path[-1] or len(path) < len(emitted)):
            yield node, node in accepted_nodes
