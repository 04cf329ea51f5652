"""Shapes of trees: where a number of guesses promises to keep most of them.

A node is known by its rank among its siblings, in the order in which they are offered. Its chance is the product of the
shares on its path, and the chances of all nodes sum up to the guesses kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count

from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tree without tokens: parents before children, siblings in the order of their ranks."""

    parent: tuple[int, ...]  # [N]; -1 = the root
    rank: tuple[int, ...]  # [N] among its siblings, from 0
    accept_prob: tuple[float, ...]  # [N] that the node is kept

    @property
    def kept(self) -> float:
        """Expected guesses kept."""
        return sum(self.accept_prob)

    @property
    def depth(self) -> int:
        """Guesses on the longest path."""
        depths: list[int] = []
        for above in self.parent:
            depths.append(1 if above < 0 else depths[above] + 1)
        return max(depths, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a tree should be, and what a token then costs."""

    nodes: int
    depth: int
    seconds: float  # for each token emitted


def shares(acceptance: Sequence[float]) -> tuple[float, ...]:
    """s_b = a_b (1 - a_1) ... (1 - a_(b-1)): the chance that child b is kept if its parent is.

    Args:
        acceptance: a_b in [0, 1], the chance that child b is kept if its parent is and its earlier siblings are not.

    Raises:
        OutriderError: a chance is outside [0, 1].
    """
    out, left = [], 1.0
    for rate in acceptance:
        if not 0 <= rate <= 1:
            raise OutriderError(f"an acceptance rate is {rate}; use a share from 0 to 1")
        out.append(left * rate)
        left *= 1 - rate
    return tuple(out)


def sequoia(acceptance: Sequence[float], *, nodes: int, depth: int) -> Shape:
    """The tree of at most so many nodes and levels that keeps most: Chen et al. 2024 (Sequoia), section 3.1.

    F(n, l) = max over n_1 + n_2 + ... <= n of s_1 (1 + F(n_1 - 1, l - 1)) + s_2 (1 + F(n_2 - 1, l - 1)) + ...

    Args:
        acceptance: by rank, as `shares` takes it; children beyond it are never kept.
        nodes: guesses at most, the root not counted.
        depth: guesses on a path at most.

    Raises:
        OutriderError: a chance is outside [0, 1], or a size is below 0.
    """
    return _Programme(shares(acceptance), nodes, depth).shape()


def best_size(
    acceptance: Sequence[float], *, draft: float, verify: Callable[[int], float], nodes: int, depth: int
) -> Size:
    """argmin over n, l of (l d + v(n)) / (1 + F(n, l)): Chen et al. 2024 (Sequoia), section 3.3.

    Args:
        acceptance: by rank, as `shares` takes it.
        draft: d, seconds of a pass of the draft, which makes one level.
        verify: v, seconds of a round without its drafting, by the number of guesses in it.
        nodes: guesses at most.
        depth: levels at most.

    Returns:
        The best size, the smallest among equals; no nodes where plain decoding is the fastest.

    Raises:
        OutriderError: a chance is outside [0, 1], or a size is below 0.
    """
    table = _Programme(shares(acceptance), nodes, depth).best
    cost = [verify(n) for n in range(nodes + 1)]
    sizes = [
        Size(nodes=n, depth=level, seconds=(level * draft + cost[n]) / (1 + table[level][n]))
        for level in range(depth + 1)
        for n in (range(1, nodes + 1) if level else range(1))
    ]
    return min(sizes, key=lambda size: (size.seconds, size.nodes, size.depth))


def best_first(children: Callable[[tuple[int, ...]], Sequence[float]], nodes: int) -> Shape:
    """The `nodes` likeliest nodes of an endless tree, likeliest first: Wang et al. 2024 (OPT-Tree), section 3.

    No tree of so many nodes keeps more, since no node is likelier than its parent or than the sibling before it.

    Args:
        children: from the ranks on a node's path to the shares of its children, which must not rise.
        nodes: guesses at most.
    """
    parent: list[int] = []
    ranks: list[int] = []
    chances: list[float] = []
    order = count()
    queue: list[tuple[float, int, int, tuple[int, ...], float, Sequence[float]]] = []

    def wait(above: int, path: tuple[int, ...], chance: float, siblings: Sequence[float]) -> None:
        if path[-1] < len(siblings):
            heappush(queue, (-chance * siblings[path[-1]], next(order), above, path, chance, siblings))

    wait(-1, (0,), 1.0, children(()))
    while queue and len(parent) < nodes:
        negative, _, above, path, base, siblings = heappop(queue)
        node = len(parent)
        parent.append(above)
        ranks.append(path[-1])
        chances.append(-negative)
        if len(parent) < nodes:
            wait(above, (*path[:-1], path[-1] + 1), base, siblings)
            wait(node, (*path, 0), -negative, children(path))
    return Shape(parent=tuple(parent), rank=tuple(ranks), accept_prob=tuple(chances))


def factorised(marginals: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The likeliest prefixes where each position has a law of its own, whatever stands before: DDTree (2026).

    Args:
        marginals: [depth][breadth] the chances of the ranked tokens at each position, likeliest first.
        nodes: guesses at most.
    """
    return best_first(lambda path: marginals[len(path)] if len(path) < len(marginals) else (), nodes)


def bar(settled: Iterable[float], growing: Iterable[float], ahead: Sequence[float], nodes: int) -> float:
    """The chance that the last of the `nodes` likeliest nodes will have once a tree is grown; 0 where all fit.

    Args:
        settled: chances of nodes below which nothing more comes.
        growing: chances of nodes that may be grown from.
        ahead: what such a node promises: chances of nodes below it if it is kept, likeliest first.
        nodes: that there is room for, at least 1.
    """
    likely = nlargest(nodes, growing)
    values = nlargest(nodes, (*settled, *likely))
    least = values[-1] if len(values) == nodes else 0.0
    for chance in likely:
        for share in ahead:
            if chance * share <= least:
                break
            values.append(chance * share)
    return nlargest(nodes, values)[-1] if len(values) >= nodes else 0.0


class _Programme:
    """Tables of F(n, l), and of how many nodes each child was given."""

    def __init__(self, share: Sequence[float], nodes: int, depth: int) -> None:
        if nodes < 0 or depth < 0:
            raise OutriderError(f"a tree of {nodes} nodes and {depth} levels cannot be; use sizes of at least 0")
        self._share, self._size = share, (nodes, depth)
        self.best = [[0.0] * (nodes + 1)]  # [level][nodes]
        self._given: list[list[list[int]]] = [[]]  # [level][rank][nodes] to the child's own tree; 0: no more children
        for _ in range(depth):
            self._level()

    def _level(self) -> None:
        below, size = self.best[-1], len(self.best[0])
        later, given = [0.0] * size, []
        for share in reversed(self._share):
            gains, pick = [0.0], [0]
            for n in range(1, size):
                options = [share * (1 + below[y - 1]) + later[n - y] for y in range(1, n + 1)]
                best = max(range(n), key=options.__getitem__)
                gains.append(options[best])
                pick.append(best + 1 if options[best] > 0 else 0)
            later = gains
            given.append(pick)
        self.best.append(later)
        self._given.append(given[::-1])

    def shape(self) -> Shape:
        """The best tree of the whole size, level by level."""
        nodes, depth = self._size
        parent: list[int] = []
        rank: list[int] = []
        chance: list[float] = []
        level = [(-1, 1.0, nodes)]
        for left in range(depth, 0, -1):
            deeper = []
            for above, base, room in level:
                for at, pick in enumerate(self._given[left]):
                    if not (own := pick[room]):
                        break
                    deeper.append((len(parent), base * self._share[at], own - 1))
                    parent.append(above)
                    rank.append(at)
                    chance.append(base * self._share[at])
                    room -= own
            level = deeper
        return Shape(parent=tuple(parent), rank=tuple(rank), accept_prob=tuple(chance))
