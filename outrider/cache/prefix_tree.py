"""Texts in blocks, as a tree: which blocks a text may take over from texts before it, and which one goes first.

A page is a block that holds text and is never written again. Below it stand the pages that go on from it, so that a
path from a root is a text, and a page says of its block all that its keys and values depend on. Pages are found by
their tokens themselves, so no two texts are ever taken for one. Each scope has a root of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

BLOCK = 64  # tokens of a block, as native/attention.h has it


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block and the text in it."""

    block: int
    above: CachedBlock | None
    tokens: tuple[int, ...]  # of this block; fewer than `BLOCK` only where a text ended
    scope: str
    below: dict[tuple[int, ...], CachedBlock] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)  # the keys of `below`, sorted
    holders: int = 0  # rows that read it; whoever reads a page reads those above it, too
    used: int = 0  # when the last of them left

    def nearest(self, tokens: tuple[int, ...]) -> tuple[CachedBlock | None, int]:
        """The page below that begins most like `tokens`, and how many tokens they share."""
        at = bisect_left(self.order, tokens)
        near = [(shared(found, tokens), found) for found in self.order[max(at - 1, 0) : at + 1]]
        most, found = max(near, default=(0, ()))
        return (self.below[found], most) if most else (None, 0)


class PrefixTree:
    """The trees of all scopes. Pages that nobody reads stay until their blocks are needed, leaves and oldest first."""

    def __init__(self) -> None:
        self.idle = self.evicted = 0  # pages that nobody reads, and that have gone
        self._roots: dict[str, CachedBlock] = {}
        self._leaves: list[
            tuple[int, int, CachedBlock]
        ] = []  # heap of those that may go, and some that were used again
        self._now = 0

    def match(self, scope: str, tokens: Sequence[int]) -> tuple[list[CachedBlock], CachedBlock | None, int]:
        """The longest known beginning of a text.

        Returns:
            whole pages; one more of which the text shares the beginning, if any; and how many tokens of it.
        """
        found: list[CachedBlock] = []
        page = self._roots.get(scope)
        while page is not None:
            begin = BLOCK * len(found)
            below, most = page.nearest(tuple(tokens[begin : begin + BLOCK]))
            if most < BLOCK:
                return found, below, most
            assert below is not None
            found.append(below)
            page = below
        return found, None, 0

    def insert(self, scope: str, above: CachedBlock | None, tokens: tuple[int, ...], block: int) -> CachedBlock:
        """The page of these tokens behind `above`, or at a text's beginning: a new one, or one that says as much."""
        parent = above or self._roots.setdefault(scope, CachedBlock(-1, None, (), scope))
        known, most = parent.nearest(tokens)
        if known is not None and most == len(tokens):
            return known
        page = parent.below[tokens] = CachedBlock(block, parent, tokens, scope)
        insort(parent.order, tokens)
        self.idle += 1
        self._rest(page)
        return page

    def acquire(self, page: CachedBlock) -> None:
        """Somebody reads a page; those above it are held already."""
        page.holders += 1
        if page.holders == 1:
            self.idle -= 1

    def release(self, page: CachedBlock) -> None:
        """Somebody reads a page no longer, and nothing below it."""
        page.holders -= 1
        if not page.holders:
            self.idle += 1
            self._rest(page)

    def evict(self) -> int:
        """The block of the idle leaf that was left longest ago, which is forgotten."""
        while True:
            used, _, page = heappop(self._leaves)
            if used == page.used and not page.holders and not page.below:
                break
        above = page.above
        assert above is not None
        del above.below[page.tokens], above.order[bisect_left(above.order, page.tokens)]
        page.used, self.idle, self.evicted = -1, self.idle - 1, self.evicted + 1
        if not above.below and above.above is None and self._roots.get(page.scope) is above:
            del self._roots[page.scope]
        elif not above.below and above.above is not None and not above.holders:
            heappush(self._leaves, (above.used, above.block, above))
        return page.block

    def forget(self) -> None:
        """No text begins with any of these pages any more; what nobody reads goes as before."""
        self._roots.clear()

    def _rest(self, page: CachedBlock) -> None:
        self._now += 1
        page.used = self._now
        if page.below:
            return
        heappush(self._leaves, (page.used, page.block, page))
        if len(self._leaves) > 2 * self.idle + BLOCK:
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[2].used and not entry[2].holders]
            heapify(self._leaves)


def shared(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two texts, both lists or both tuples, begin with in common."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
