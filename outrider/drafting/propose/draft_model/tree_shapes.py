"""Compute the shapes of draft trees that promise the most accepted tokens.

A node is identified by its rank among its siblings, in the order in which they are verified. Its
acceptance probability is the product of the conditional probabilities on its path. The sum over all
nodes is the expected number of accepted draft tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """A tree without tokens. Parents come before children, and siblings are in the order of their ranks."""

    parent: tuple[int, ...]  # [N]; -1: the root
    rank: tuple[int, ...]  # [N] among its siblings, from 0
    accept_prob: tuple[float, ...]  # [N] probability that the node is accepted

    @property
    def expected_accepted(self) -> float:
        """Expected number of accepted draft tokens."""
        return sum(self.accept_prob)


def best_first(children: Callable[[tuple[int, ...]], Sequence[float]], nodes: int) -> TreeShape:
    """Return the `nodes` likeliest nodes of an infinite tree, likeliest first: Wang et al. 2024 (OPT-Tree), section 3.

    No other tree with this number of nodes has more expected accepted tokens, because no node is
    likelier than its parent or than its previous sibling.

    Args:
        children: returns the conditional probabilities of a node's children, from the ranks on the
            node's path. They must not rise.
        nodes: most draft tokens.
    """
    parents: list[int] = []
    ranks: list[int] = []
    probs: list[float] = []
    order = count()
    # Minus the probability, order, parent, ranks on the path, probability of the parent, and the
    # siblings' conditional probabilities.
    queue: list[tuple[float, int, int, tuple[int, ...], float, Sequence[float]]] = []

    def push(parent: int, path: tuple[int, ...], parent_prob: float, siblings: Sequence[float]) -> None:
        if path[-1] < len(siblings):
            heappush(queue, (-parent_prob * siblings[path[-1]], next(order), parent, path, parent_prob, siblings))

    push(-1, (0,), 1.0, children(()))
    while queue and len(parents) < nodes:
        negative_prob, _, parent, path, parent_prob, siblings = heappop(queue)
        node = len(parents)
        parents.append(parent)
        ranks.append(path[-1])
        probs.append(-negative_prob)
        if len(parents) < nodes:
            push(parent, (*path[:-1], path[-1] + 1), parent_prob, siblings)
            push(node, (*path, 0), -negative_prob, children(path))
    return TreeShape(parent=tuple(parents), rank=tuple(ranks), accept_prob=tuple(probs))


def pruning_threshold(
    final: Iterable[float], growing: Iterable[float], descendants: Sequence[float], nodes: int
) -> float:
    """Return the probability of the last of the `nodes` likeliest nodes once a tree is grown; 0 if all fit.

    Args:
        final: probabilities of nodes that get no descendants.
        growing: probabilities of nodes that may get descendants.
        descendants: conditional probabilities of the descendants of such a node, likeliest first.
        nodes: most draft tokens, at least 1.
    """
    likeliest = nlargest(nodes, growing)
    values = nlargest(nodes, (*final, *likeliest))
    lowest = values[-1] if len(values) == nodes else 0.0
    for prob in likeliest:
        for conditional in descendants:
            if prob * conditional <= lowest:
                break
            values.append(prob * conditional)
    return nlargest(nodes, values)[-1] if len(values) >= nodes else 0.0
