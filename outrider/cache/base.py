"""What every cache promises, and the layout of one pass over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Round

LEAST_ROOM = 16  # tokens that a slot has room for at least: what the check before first use takes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """The columns of one row in a pass whose rows are packed one after another."""

    slot: int
    begin: int  # first column
    end: int  # one past the last column
    start: int  # where in the slot the first column is written
    nodes: int  # how many of its last columns are guesses
    first: int  # which node the first of them is
    base: int  # where in the slot node 0 is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One pass: T columns, packed without padding, each a committed token or a guess."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64; guesses at equal depth share one
    spans: tuple[RowSpan, ...]  # [B]
    keep: torch.Tensor  # [K] int64: the columns whose logits are wanted
    nodes: torch.Tensor | None  # [B, M] int64 into `keep`, per node asked for; None where it is `keep`'s own order
    ancestors: torch.Tensor | None  # [B, N, N] bool; None where every row is a chain

    def per_node(self, values: torch.Tensor) -> torch.Tensor:
        """[K, ...] of the kept columns as [B, M, ...] of the nodes asked for."""
        if self.nodes is not None:
            return values[self.nodes]
        return values.view(len(self.spans), -1, *values.shape[1:])

    def per_feed(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, ...] of all columns as [B][F, ...] of each row's feed."""
        return tuple(values[span.begin : span.end - span.nodes] for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """What caches may take, and whether texts share it."""

    gigabytes: float | None = None  # of all models, on the native kernels; None: whole contexts, as far as it is free
    share: bool = True  # prompts that begin alike, within a scope, are read once


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How full a cache is, and what it has spared. The last four only ever grow."""

    token_bytes: int = 0  # that a cached token takes; 0 where memory does not grow with texts
    block_tokens: int = 0  # tokens of a block; 0 where every slot has room for a whole context
    blocks: int = 0
    held: int = 0  # blocks of rows that run
    kept: int = 0  # blocks of texts that have ended, which go when others need them
    asked: int = 0  # tokens of texts that were taken in
    spared: int = 0  # those of them that were cached already
    evicted: int = 0  # blocks
    preempted: int = 0  # rows, as the engine counts them

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.blocks - self.held - self.kept


class Cache(Protocol):
    """Holds what the model has read, per slot.

    Law: after `commit`, scoring equals scoring a fresh prefill of the committed text, whatever of it was cached before
    it was admitted. A cache is told what was kept and never what to undo, so that states which cannot be trimmed can
    keep the same promise.
    """

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        """Take `slot` for a text that begins with `tokens`; return how many of them are cached already.

        The last one never is. Where `share` is on, what texts begin with is shared within a `scope` and never beyond;
        None shares nothing. What is fed must then be what `Batch.rows` say.
        """

    def share(self, on: bool) -> None:
        """From now on let texts share what they begin with, where this cache can, or not. At first they do not."""

    def allot(self, blocks: int) -> None:
        """Have memory for so many blocks (see `CacheUse`) from now on, while no row runs."""

    def fits(self, ends: Mapping[int, int]) -> bool:
        """Whether there is memory for these slots to hold so many tokens each, guesses included, at the same time."""

    def use(self) -> CacheUse:
        """How full it is."""

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        """Make room behind the committed text for the feed and the guesses of each row.

        With `first` >= 0 the feed and the nodes before `first` have been staged in this round, and only nodes from
        `first` on are added; a draft model grows its own chain so. What is staged is lost unless committed.
        """

    def commit(self, round: Round) -> None:
        """Keep each row's feed and its accepted path."""

    def release(self, slot: int) -> None:
        """Forget a slot."""

    def length(self, slot: int) -> int:
        """Committed tokens that the slot holds."""

    def bytes(self) -> int:
        """Memory in use, in bytes."""


class Roomy:
    """A cache whose slots have room for a whole context each, and which shares nothing."""

    def share(self, on: bool) -> None:
        pass

    def allot(self, blocks: int) -> None:
        raise NotImplementedError("it has no blocks")

    def fits(self, ends: Mapping[int, int]) -> bool:
        return True

    def use(self) -> CacheUse:
        return CacheUse()


class WrappedCache:
    """A cache around a cache: everything is the inner one's, until a subclass says otherwise."""

    def __init__(self, inner: Cache) -> None:
        self._inner = inner

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        return self._inner.admit(slot, tokens, scope)

    def share(self, on: bool) -> None:
        self._inner.share(on)

    def allot(self, blocks: int) -> None:
        self._inner.allot(blocks)

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._inner.fits(ends)

    def use(self) -> CacheUse:
        return self._inner.use()

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(batch, draft, first)

    def commit(self, round: Round) -> None:
        self._inner.commit(round)

    def release(self, slot: int) -> None:
        self._inner.release(slot)

    def length(self, slot: int) -> int:
        return self._inner.length(slot)

    def bytes(self) -> int:
        return self._inner.bytes()


def fitting(cache: Cache, ends: Mapping[int, int], wanted: Mapping[int, int]) -> frozenset[int]:
    """The slots that may grow from `ends` to what they have `wanted`, those named first before the others."""
    if cache.fits({**ends, **wanted}):
        return frozenset(wanted)
    held, found = dict(ends), set()
    for slot, end in wanted.items():
        if cache.fits({**held, slot: end}):
            held[slot] = end
            found.add(slot)
    return frozenset(found)


def lay_out(batch: Batch, draft: Draft, first: int, device: torch.device) -> Layout:
    """Pack the columns of `batch` and `draft` (see `Cache.stage`). Host work: no read of a device tensor."""
    fed = first < 0
    feeds = [len(feed) for feed in batch.feed]
    lead = list(accumulate(feeds, initial=0))
    skip = 0 if fed else first
    spans, nodes, column = [], [], 0
    pool: list[int] = []
    keep: list[int] = []
    for b, row in enumerate(batch.rows):
        guesses = max(draft.width[b] - skip, 0)
        length = (feeds[b] if fed else 0) + guesses
        base = batch.start[b] + feeds[b]
        start = batch.start[b] if fed else base + skip
        end = column + length
        spans.append(RowSpan(slot=row.slot, begin=column, end=end, start=start, nodes=guesses, first=skip, base=base))
        if fed:
            pool += range(lead[b], lead[b + 1])
        pool += range(lead[-1] + b * draft.size + skip, lead[-1] + b * draft.size + skip + guesses)
        root = [len(keep)] if fed else []
        wanted = range(column + length - guesses - len(root), column + length)
        at = list(range(len(keep), len(keep) + len(wanted)))
        nodes.append(at + [at[0] if at else 0] * (len(root) + draft.size - skip - len(at)))
        keep += wanted
        column += length
    dense = [at for row in nodes for at in row] == list(range(len(keep)))
    tokens, positions = _columns(batch, draft, pool, device)
    return Layout(
        tokens=tokens,
        positions=positions,
        spans=tuple(spans),
        keep=tree.upload(keep, device),
        nodes=None if dense else tree.upload(nodes, device),
        ancestors=None if draft.chain else tree.ancestors(draft.parent),
    )


def _columns(batch: Batch, draft: Draft, pool: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [T], gathered from all feeds followed by all nodes."""
    ends = [start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True)]
    tokens = tree.upload([token for feed in batch.feed for token in feed], device)
    places = [at for start, end in zip(batch.start, ends, strict=True) for at in range(start, end)]
    positions = tree.upload(places, device)
    if draft.size:
        depth = tree.upload(ends, device)[:, None] - 1 + tree.depths(draft)
        tokens = torch.cat([tokens, draft.tokens.flatten()])
        positions = torch.cat([positions, depth.flatten()])
    if pool == list(range(len(tokens))):
        return tokens, positions
    chosen = tree.upload(pool, device)
    return tokens[chosen], positions[chosen]
