"""The `Cache` protocol, and the layout of one forward pass over a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Round

MIN_CAPACITY = 16  # smallest capacity of a slot, in tokens; the check after loading needs it


class SequenceSpan(NamedTuple):
    """The columns of one sequence in a packed pass: its feed, then its draft tokens."""

    slot: int
    begin: int  # first column
    end: int  # one past the last column
    start: int  # where in the slot the first column is written
    nodes: int  # number of draft tokens, which are its last columns
    first: int  # index in the draft of the first of these draft tokens
    base: int  # where in the slot draft token 0 is written
    num_outputs: int  # last columns whose logits are needed: the end of the feed, which is node 0, and the draft tokens

    @property
    def outputs(self) -> range:
        """The columns whose logits are needed."""
        return range(self.end - self.num_outputs, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One pass of T columns without padding. Each column is a committed token or a draft token."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64; draft tokens at equal depth have equal positions
    spans: tuple[SequenceSpan, ...]  # [B]
    keep: torch.Tensor  # [K] int64: the columns whose logits are needed
    nodes: torch.Tensor | None  # [B, M] int64 indices into `keep`, by node; None: in the order of `keep`
    ancestors: torch.Tensor | None  # [B, N, N] bool; None: every draft is a chain

    def per_node(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange [K, ...] of the kept columns to [B, M, ...] of the nodes."""
        if self.nodes is not None:
            return values[self.nodes]
        return values.view(len(self.spans), -1, *values.shape[1:])

    def per_feed(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut [T, ...] of all columns to [B][F, ...] of each sequence's feed."""
        return tuple(values[span.begin : span.end - span.nodes] for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Memory of the KV caches, and whether prompts share it."""

    gigabytes: float | None = None  # 10^9 bytes for all models, native kernels; None: full contexts if memory allows
    share: bool = True  # reuse the cache of equal prompt prefixes within a scope


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """How full a cache is, and its hits. The last four fields are counters."""

    token_bytes: int = 0  # bytes of a cached token; 0: memory does not grow with the sequences
    block_tokens: int = 0  # tokens of a block; 0: every slot has memory for a full context
    slot_tokens: int = 0  # most tokens of one sequence, if there are blocks
    blocks: int = 0
    full_blocks: int = 0  # blocks for a full context in each slot
    used_blocks: int = 0  # blocks of running sequences
    cached_blocks: int = 0  # blocks of finished sequences, evicted when needed
    query_tokens: int = 0  # tokens of admitted prompts
    hit_tokens: int = 0  # of these, tokens that were cached already
    evicted_blocks: int = 0
    preempted: int = 0  # sequences that were preempted; the engine counts them

    @property
    def free_blocks(self) -> int:
        """Empty blocks."""
        return self.blocks - self.used_blocks - self.cached_blocks


class Cache(Protocol):
    """The KV cache or recurrent state of each slot.

    Contract: after `commit`, scoring equals scoring after a fresh prefill of the committed tokens,
    whatever was cached before. A cache keeps what is committed, and nothing is ever rolled back. So
    recurrent states, which cannot be trimmed, satisfy the same contract.
    """

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        """Start a sequence in `slot`. Return how many leading `tokens` are cached already.

        The result is always less than `len(tokens)`: the last token must be fed to get its logits.
        With prefix caching, prefixes are shared within a `scope` only; None shares nothing.
        """

    def set_prefix_caching(self, on: bool) -> None:
        """Turn prefix caching on or off, if this cache supports it. It is off at first."""

    def resize(self, blocks: int) -> None:
        """Change the number of blocks (see `CacheUsage`). No sequence may run."""

    def fits(self, ends: Mapping[int, int]) -> bool:
        """Return whether there is memory for `ends[slot]` tokens in each slot, including draft tokens."""

    def usage(self) -> CacheUsage:
        """Return memory use and counters."""

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        """Reserve entries behind the committed tokens for the feed and the draft tokens of each sequence.

        With `first` >= 0 the feed and the nodes before `first` are staged already, and only the nodes from `first` on
        are added: a draft model drafts its own chain this way. Staged entries are lost unless they are committed.
        """

    def commit(self, round: Round) -> None:
        """Keep the feed and the accepted path of each sequence."""

    def release(self, slot: int) -> None:
        """End the sequence of a slot."""

    def length(self, slot: int) -> int:
        """Return the number of committed tokens in the slot."""

    def bytes(self) -> int:
        """Return the bytes in use."""


class UnboundedCache:
    """Base of caches whose slots have memory for a full context each, without prefix caching."""

    def set_prefix_caching(self, on: bool) -> None:
        pass

    def resize(self, blocks: int) -> None:
        raise NotImplementedError("this cache has no blocks")

    def fits(self, ends: Mapping[int, int]) -> bool:
        return True

    def usage(self) -> CacheUsage:
        return CacheUsage()


class WrappedCache:
    """Delegates to another cache. Subclasses override what differs."""

    def __init__(self, inner: Cache) -> None:
        self._inner = inner

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        return self._inner.admit(slot, tokens, scope)

    def set_prefix_caching(self, on: bool) -> None:
        self._inner.set_prefix_caching(on)

    def resize(self, blocks: int) -> None:
        self._inner.resize(blocks)

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._inner.fits(ends)

    def usage(self) -> CacheUsage:
        return self._inner.usage()

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


def prompts_that_fit(cache: Cache, ends: Mapping[int, int], wanted: Mapping[int, int]) -> frozenset[int]:
    """Return the slots that can grow from `ends` to `wanted` tokens. Earlier slots come first."""
    if cache.fits({**ends, **wanted}):
        return frozenset(wanted)
    granted = dict(ends)
    fitting = set()
    for slot, end in wanted.items():
        if cache.fits({**granted, slot: end}):
            granted[slot] = end
            fitting.add(slot)
    return frozenset(fitting)


def pack(batch: Batch, widths: Sequence[int], first: int) -> list[SequenceSpan]:
    """Pack the columns of a pass without padding: `widths[b]` draft tokens of each sequence, and `first` as in `stage`.

    This is the order of the columns on every backend.
    """
    has_feed = first < 0
    skip = max(first, 0)
    spans = []
    begin = 0
    for seq, cached, feed, width in zip(batch.seqs, batch.start, batch.feed, widths, strict=True):
        base = cached + len(feed)
        start = cached if has_feed else base + skip
        nodes = width - skip if width > skip else 0
        end = begin + nodes + (len(feed) if has_feed else 0)
        spans.append(SequenceSpan(seq.slot, begin, end, start, nodes, skip, base, nodes + has_feed))
        begin = end
    return spans


def node_order(spans: Sequence[SequenceSpan], num_nodes: int) -> list[int] | None:
    """Return the index among all outputs of each of `num_nodes` nodes of each sequence, flat.

    Padding repeats the first node of the sequence. None: the order is 0, 1, 2, ...
    """
    counts = [span.num_outputs for span in spans]
    if sum(counts) == num_nodes * len(spans):
        return None
    order: list[int] = []
    begin = 0
    for count in counts:
        padding = begin if count else 0
        order += range(begin, begin + count)
        order += [padding] * (num_nodes - count)
        begin += count
    return order


def lay_out(batch: Batch, draft: Draft, first: int, device: torch.device) -> Layout:
    """Lay out the columns of `batch` and `draft` (see `Cache.stage`). It reads no tensor on the device."""
    size = draft.size  # read from the tensor once
    spans = pack(batch, draft.width, first)
    num_fed = sum(map(len, batch.feed))
    columns: list[int] = []  # indices into all feeds followed by all nodes
    keep: list[int] = []
    feed_begin = 0
    for b, span in enumerate(spans):
        if first < 0:
            columns += range(feed_begin, feed_begin + len(batch.feed[b]))
            feed_begin += len(batch.feed[b])
        first_node = num_fed + b * size + span.first
        columns += range(first_node, first_node + span.nodes)
        keep += span.outputs
    num_nodes = size - max(first, 0) + (first < 0)
    order = node_order(spans, num_nodes)
    tokens, positions = _gather_columns(batch, draft, columns, device)
    return Layout(
        tokens=tokens,
        positions=positions,
        spans=tuple(spans),
        keep=tree.upload(keep, device),
        nodes=None if order is None else tree.upload(order, device).view(len(spans), num_nodes),
        ancestors=None if draft.chain else tree.ancestors(draft.parent),
    )


def _gather_columns(
    batch: Batch, draft: Draft, columns: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather tokens and positions [T]. `columns` indexes all feeds followed by all nodes."""
    ends = batch.ends
    tokens = tree.upload([token for feed in batch.feed for token in feed], device)
    feed_positions = [position for start, end in zip(batch.start, ends, strict=True) for position in range(start, end)]
    positions = tree.upload(feed_positions, device)
    if draft.size:
        node_positions = tree.upload(ends, device)[:, None] - 1 + tree.depths(draft)
        tokens = torch.cat([tokens, draft.tokens.flatten()])
        positions = torch.cat([positions, node_positions.flatten()])
    if columns == list(range(len(tokens))):
        return tokens, positions
    chosen = tree.upload(columns, device)
    return tokens[chosen], positions[chosen]
