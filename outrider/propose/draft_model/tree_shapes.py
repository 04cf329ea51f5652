"""Compute the shapes of draft trees that promise the most accepted tokens.

A node is identified by its rank among its siblings, in the order in which they are verified. Its acceptance probability
is the product of the conditional probabilities on its path. The sum over all nodes is the expected number of accepted
draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count

from outrider.errors import OutriderError


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

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        depths: list[int] = []
        for parent in self.parent:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSize:
    """The best size of a tree, and what a token costs with it."""

    nodes: int
    depth: int
    seconds: float  # per emitted token


def child_probs(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Return s_b = a_b (1 - a_1) ... (1 - a_(b-1)), the probability that child b is accepted if its parent is.

    Args:
        acceptance: a_b in [0, 1], the probability that child b is accepted if its parent is and its earlier siblings
            are not.

    Raises:
        OutriderError: a probability is outside [0, 1].
    """
    probs = []
    none_before = 1.0  # probability that no earlier sibling is accepted
    for rate in acceptance:
        if not 0 <= rate <= 1:
            raise OutriderError(f"an acceptance rate is {rate}; use a share from 0 to 1")
        probs.append(none_before * rate)
        none_before *= 1 - rate
    return tuple(probs)


def sequoia(acceptance: Sequence[float], *, nodes: int, depth: int) -> TreeShape:
    """Return the tree with the most expected accepted tokens: Chen et al. 2024 (Sequoia), section 3.1.

    F(n, l) = max over n_1 + n_2 + ... <= n of s_1 (1 + F(n_1 - 1, l - 1)) + s_2 (1 + F(n_2 - 1, l - 1)) + ...

    Args:
        acceptance: by rank, as in `child_probs`; further children are never accepted.
        nodes: most draft tokens, without the root.
        depth: most draft tokens on a path.

    Raises:
        OutriderError: a probability is outside [0, 1], or a size is below 0.
    """
    return _DynamicProgram(child_probs(acceptance), nodes, depth).shape()


def best_size(
    acceptance: Sequence[float], *, draft: float, verify: Callable[[int], float], nodes: int, depth: int
) -> TreeSize:
    """Return argmin over n, l of (l d + v(n)) / (1 + F(n, l)): Chen et al. 2024 (Sequoia), section 3.3.

    Args:
        acceptance: by rank, as in `child_probs`.
        draft: d, seconds of a pass of the draft model, which makes one level.
        verify: v, seconds of a round without drafting, by the number of draft tokens in it.
        nodes: most draft tokens.
        depth: most levels.

    Returns:
        The best size, the smallest among equals; no nodes if plain decoding is the fastest.

    Raises:
        OutriderError: a probability is outside [0, 1], or a size is below 0.
    """
    expected = _DynamicProgram(child_probs(acceptance), nodes, depth).expected
    verify_seconds = [verify(n) for n in range(nodes + 1)]
    sizes = []
    for level in range(depth + 1):
        for n in range(1, nodes + 1) if level else range(1):
            seconds = (level * draft + verify_seconds[n]) / (1 + expected[level][n])
            sizes.append(TreeSize(nodes=n, depth=level, seconds=seconds))
    return min(sizes, key=lambda size: (size.seconds, size.nodes, size.depth))


def best_first(children: Callable[[tuple[int, ...]], Sequence[float]], nodes: int) -> TreeShape:
    """Return the `nodes` likeliest nodes of an infinite tree, likeliest first: Wang et al. 2024 (OPT-Tree), section 3.

    No other tree with this number of nodes has more expected accepted tokens, because no node is likelier than its
    parent or than its previous sibling.

    Args:
        children: returns the conditional probabilities of a node's children, from the ranks on the node's path. They
            must not rise.
        nodes: most draft tokens.
    """
    parents: list[int] = []
    ranks: list[int] = []
    probs: list[float] = []
    order = count()
    # Minus the probability, order, parent, ranks on the path, probability of the parent, and the siblings'
    # conditional probabilities.
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


def independent_positions(marginals: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """Return the likeliest prefixes if the distribution of each position ignores earlier tokens: DDTree (2026).

    Args:
        marginals: [depth][breadth] probabilities of the ranked tokens at each position, likeliest first.
        nodes: most draft tokens.
    """
    return best_first(lambda path: marginals[len(path)] if len(path) < len(marginals) else (), nodes)


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


class _DynamicProgram:
    """Tables of F(n, l), and of the number of nodes that each child gets."""

    def __init__(self, probs: Sequence[float], nodes: int, depth: int) -> None:
        if nodes < 0 or depth < 0:
            raise OutriderError(f"a tree of {nodes} nodes and {depth} levels is not possible; use sizes of at least 0")
        self._probs = probs
        self._nodes = nodes
        self._depth = depth
        self.expected = [[0.0] * (nodes + 1)]  # F, [level][nodes]
        # [level][rank][nodes]: the size of the child's subtree, with the child; 0: no more children
        self._subtree_sizes: list[list[list[int]]] = [[]]
        for _ in range(depth):
            self._add_level()

    def _add_level(self) -> None:
        below = self.expected[-1]
        size = len(below)
        later = [0.0] * size  # expected accepted tokens of later siblings, by their nodes
        subtree_sizes = []
        for prob in reversed(self._probs):
            gains = [0.0]
            choices = [0]
            for n in range(1, size):
                options = [prob * (1 + below[y - 1]) + later[n - y] for y in range(1, n + 1)]
                best = max(range(n), key=options.__getitem__)
                gains.append(options[best])
                choices.append(best + 1 if options[best] > 0 else 0)
            later = gains
            subtree_sizes.append(choices)
        self.expected.append(later)
        self._subtree_sizes.append(subtree_sizes[::-1])

    def shape(self) -> TreeShape:
        """Return the best tree of the whole size, level by level."""
        parents: list[int] = []
        ranks: list[int] = []
        probs: list[float] = []
        level = [(-1, 1.0, self._nodes)]  # node, its probability, and the nodes below it
        for levels_left in range(self._depth, 0, -1):
            next_level = []
            for parent, parent_prob, nodes_left in level:
                for rank, sizes in enumerate(self._subtree_sizes[levels_left]):
                    subtree_size = sizes[nodes_left]
                    if not subtree_size:
                        break
                    prob = parent_prob * self._probs[rank]
                    next_level.append((len(parents), prob, subtree_size - 1))
                    parents.append(parent)
                    ranks.append(rank)
                    probs.append(prob)
                    nodes_left -= subtree_size
            level = next_level
        return TreeShape(parent=tuple(parents), rank=tuple(ranks), accept_prob=tuple(probs))
