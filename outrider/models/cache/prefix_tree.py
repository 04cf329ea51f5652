"""The prefix tree of cached blocks, for prefix caching and eviction.

A cached block has committed tokens and is never written again. Its children have the tokens that
follow, so a path from a root is a prefix of a sequence. Blocks are compared by their tokens, not by
hashes, so two prefixes are never confused. Each scope has its own root.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

BLOCK = 64  # tokens per block; kBlock of models/native/csrc/attention.h


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block of the KV cache with its tokens, as a node of the prefix tree."""

    index: int
    parent: CachedBlock | None
    tokens: tuple[int, ...]  # fewer than `BLOCK` only at the end of a finished sequence
    scope: str
    children: dict[tuple[int, ...], CachedBlock] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)  # the keys of `children`, sorted
    holders: int = 0  # sequences that use it; they also use its ancestors
    used: int = 0  # time of the last release

    def nearest(self, tokens: tuple[int, ...]) -> tuple[CachedBlock | None, int]:
        """Return the child that shares the longest prefix with `tokens`, and the length of that prefix."""
        at = bisect_left(self.order, tokens)
        neighbors = self.order[max(at - 1, 0) : at + 1]
        matches = [(common_prefix(key, tokens), key) for key in neighbors]
        length, key = max(matches, default=(0, ()))
        return (self.children[key], length) if length else (None, 0)


class PrefixTree:
    """The trees of all scopes. Unused blocks stay until they are evicted: leaves first, least recently used first."""

    def __init__(self) -> None:
        self.idle = 0  # cached blocks that no sequence uses
        self.evicted = 0  # counter
        self._roots: dict[str, CachedBlock] = {}
        # Heap of (time of use, block number, block). Entries whose block was used again are stale.
        self._leaves: list[tuple[int, int, CachedBlock]] = []
        self._clock = 0

    def match(self, scope: str, tokens: Sequence[int]) -> tuple[list[CachedBlock], CachedBlock | None, int]:
        """Find the longest cached prefix of `tokens`.

        Returns:
            The blocks that match completely; one more block that matches in part, or None; and how
            many of its tokens match.
        """
        matching: list[CachedBlock] = []
        block = self._roots.get(scope)
        while block is not None:
            begin = BLOCK * len(matching)
            child, matched = block.nearest(tuple(tokens[begin : begin + BLOCK]))
            if matched < BLOCK:
                return matching, child, matched
            assert child is not None
            matching.append(child)
            block = child
        return matching, None, 0

    def insert(self, scope: str, parent: CachedBlock | None, tokens: tuple[int, ...], index: int) -> CachedBlock:
        """Insert a block after `parent` (None: at the root). Returns the existing block with these tokens, if any."""
        parent = parent or self._roots.setdefault(scope, CachedBlock(-1, None, (), scope))
        existing, matched = parent.nearest(tokens)
        if existing is not None and matched == len(tokens):
            return existing
        block = parent.children[tokens] = CachedBlock(index, parent, tokens, scope)
        insort(parent.order, tokens)
        self.idle += 1
        self._add_leaf(block)
        return block

    def acquire(self, block: CachedBlock) -> None:
        """Count a use of a block. Its ancestors are in use already."""
        block.holders += 1
        if block.holders == 1:
            self.idle -= 1

    def release(self, block: CachedBlock) -> None:
        """End a use of a block."""
        block.holders -= 1
        if not block.holders:
            self.idle += 1
            self._add_leaf(block)

    def evict(self) -> int:
        """Evict the least recently used leaf and return its block number."""
        while True:
            used, _, block = heappop(self._leaves)
            if used == block.used and not block.holders and not block.children:
                break
        parent = block.parent
        assert parent is not None
        del parent.children[block.tokens]
        del parent.order[bisect_left(parent.order, block.tokens)]
        block.used = -1
        self.idle -= 1
        self.evicted += 1
        if not parent.children and parent.parent is None and self._roots.get(block.scope) is parent:
            del self._roots[block.scope]
        elif not parent.children and parent.parent is not None and not parent.holders:
            heappush(self._leaves, (parent.used, parent.index, parent))
        return block.index

    def forget(self) -> None:
        """Stop matching all current blocks, for example after a weight update. They are evicted as usual."""
        self._roots.clear()

    def _add_leaf(self, block: CachedBlock) -> None:
        self._clock += 1
        block.used = self._clock
        if block.children:
            return
        heappush(self._leaves, (block.used, block.index, block))
        if len(self._leaves) > 2 * self.idle + BLOCK:
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[2].used and not entry[2].holders]
            heapify(self._leaves)


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists or two tuples of tokens."""
    low = 0
    high = min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
