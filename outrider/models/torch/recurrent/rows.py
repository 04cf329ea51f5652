"""The tokens of one pass, arranged by sequence, for layers that process them in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from outrider.core import tree
from outrider.core.cache import Layout, SequenceSpan
from outrider.core.types import Draft

T = TypeVar("T")

CHUNK = 64  # tokens of a prompt that are processed at once; chunks end at multiples of it
_MAX_FEED = 16  # tokens of a feed that are staged; longer feeds are folded into the state first
MIN_SAVED = 24  # entries of padding that a second part must save; more operations take about as long


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one sequence that are folded into its state."""

    row: int  # index of the sequence in the batch
    begin: int  # first column of the pass
    end: int  # one past the last column
    position: int  # tokens of the sequence up to the end of the chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The staged entries of B sequences: the tokens of their feeds, followed by their draft tokens.

    There are E entries, of which the last L are new in this pass. An entry depends on the state of
    its sequence and on the entries before it on its path. Padding depends on nothing, and nothing
    depends on it.
    """

    ancestors: torch.Tensor  # [B, E, E] bool: whether an entry is on the path of another, or is the entry itself
    parent: torch.Tensor  # [B, E] int64: the entry before; -1: the state
    num_new: int  # L
    is_chain: bool  # whether each entry follows the one before it

    @property
    def num_entries(self) -> int:
        """E."""
        return self.parent.shape[1]

    @property
    def visible(self) -> torch.Tensor:
        """[B, L, E] bool: the entries on the path of each new entry, with itself."""
        return self.ancestors[:, -self.num_new :]

    def taps(self, size: int) -> torch.Tensor:
        """Return [B, L, size]: the inputs of a causal convolution for each new entry, the oldest first.

        They are indices into the last `size - 1` inputs of the state, followed by the entries.
        """
        index = torch.arange(self.num_entries - self.num_new, self.num_entries, device=self.parent.device)
        return self._taps(index.expand(len(self.parent), -1), size - 1)

    def last_taps(self, last: torch.Tensor, size: int) -> torch.Tensor:
        """Return [B, size]: the indices of entry `last` [B] and of the `size - 1` inputs before it, as in `taps`.

        The state has `size` inputs here.
        """
        return self._taps(last[:, None], size)[:, 0, 1:]

    def _taps(self, index: torch.Tensor, before: int) -> torch.Tensor:
        """Return [B, L, before + 1]: each entry of `index` [B, L] and the `before` inputs before it."""
        if self.is_chain:
            return (index + before)[..., None] + torch.arange(-before, 1, device=index.device)
        taps = [index]
        for _ in range(before):
            index = torch.where(index >= 0, self.parent.gather(1, index.clamp(min=0)), index - 1)
            taps.append(index)
        return torch.stack(taps[::-1], -1) + before


class Unpadded(NamedTuple):
    """The N new entries of a part that are not padding."""

    entries: torch.Tensor  # [N] int64 in 0 to B * L - 1
    columns: torch.Tensor  # [N] int64 in 0 to T - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The staged entries of B sequences of a pass, padded to the same number of new entries L."""

    sequences: tuple[int, ...] | None  # [B] their indices in the batch; None: all of the batch
    rows: Rows
    columns: torch.Tensor | None  # [B * L] column of each new entry, 0 for padding; None: columns are [B, L] already
    unpadded: Unpadded | None  # None: there is no padding

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange [T, ...] of the columns to [B, L, ...] of the new entries."""
        if self.columns is not None:
            values = values.index_select(0, self.columns)
        return values.view(len(self.rows.parent), -1, *values.shape[1:])

    def scatter(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write [B, L, ...] of the new entries into [T, ...] of the columns."""
        if self.columns is None:
            into.view_as(values)[:] = values
            return
        values = values.flatten(0, 1)
        if self.unpadded is None:
            into.index_copy_(0, self.columns, values)
        else:
            into.index_copy_(0, self.unpadded.columns, values.index_select(0, self.unpadded.entries))

    def pick(self, of_batch: Sequence[T]) -> tuple[T, ...]:
        """Return the values of the sequences of this part, from those of the batch."""
        return tuple(of_batch) if self.sequences is None else tuple(tree.pick(of_batch, self.sequences))

    def select(self, of_batch: torch.Tensor) -> torch.Tensor:
        """Return the rows of the sequences of this part, from those of the batch."""
        return of_batch if self.sequences is None else of_batch[list(self.sequences)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassRows:
    """All tokens of one pass: chunks of prompts, which come first, and the staged entries of all sequences.

    If few sequences have much longer drafts than the others, they are a part of their own. The
    others then need no padding to that length.
    """

    slots: tuple[int, ...]  # [B]
    positions: torch.Tensor  # [T] int64
    chunks: tuple[Chunk, ...]
    parts: tuple[Part, ...]
    feed_end: tuple[int, ...]  # [B] the last entry of the feed
    nodes: tuple[tuple[int, ...], ...]  # [B][N] the entry of each draft token

    def last_entry(self, paths: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return [B]: the entry of the last committed token, given the accepted path of each sequence."""
        zipped = zip(paths, self.nodes, self.feed_end, strict=True)
        return tuple(nodes[path[-1]] if path else end for path, nodes, end in zipped)


def arrange(layout: Layout, draft: Draft) -> PassRows:
    """Arrange the columns of a pass: the feed of each sequence, then its draft tokens."""
    device = layout.positions.device
    chunks: list[Chunk] = []
    begins = []  # first staged column, by sequence
    for row, span in enumerate(layout.spans):
        folded = _chunks(row, span)
        chunks += folded
        begins.append(folded[-1].end if folded else span.begin)
    sizes = tuple(span.end - begin for span, begin in zip(layout.spans, begins, strict=True))
    feeds = tuple(size - span.nodes for span, size in zip(layout.spans, sizes, strict=True))
    parts = []
    for sequences in _split(sizes):
        index = range(len(sizes)) if sequences is None else sequences
        own_sizes = tuple(tree.pick(sizes, index))
        columns, unpadded = _columns(tree.pick(begins, index), own_sizes, len(layout.positions), device)
        if layout.ancestors is None:
            rows = _chains(own_sizes, max(own_sizes), device)
        else:
            keep = slice(None) if sequences is None else list(sequences)
            own_feeds = tree.pick(feeds, index)
            rows = _trees(layout.ancestors[keep], draft.parent[keep], own_feeds, max(own_sizes))
        parts.append(Part(sequences=sequences, rows=rows, columns=columns, unpadded=unpadded))
    return PassRows(
        slots=tuple(span.slot for span in layout.spans),
        positions=layout.positions,
        chunks=tuple(chunks),
        parts=tuple(parts),
        feed_end=tuple(feed - 1 for feed in feeds),
        nodes=tuple(tuple(range(feed, size)) for feed, size in zip(feeds, sizes, strict=True)),
    )


def _split(sizes: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
    """Return which sequences form each part of a pass. None stands for all of them."""
    order = sorted(range(len(sizes)), key=lambda b: sizes[b])
    longest = sizes[order[-1]]
    saved = [count * (longest - sizes[order[count - 1]]) for count in range(1, len(sizes))]
    if max(saved, default=0) < MIN_SAVED:
        return (None,)
    count = 1 + saved.index(max(saved))
    return tuple(sorted(order[:count])), tuple(sorted(order[count:]))


def extend(earlier: PassRows, layout: Layout, draft: Draft) -> PassRows:
    """Arrange the columns of a pass that adds draft tokens to those of an earlier pass."""
    nodes = list(earlier.nodes)
    parts = []
    for part in earlier.parts:
        staged = part.rows.num_entries
        for b in part.pick(range(len(nodes))):
            span = layout.spans[b]
            nodes[b] = nodes[b][: span.first] + tuple(range(staged, staged + span.end - span.begin))
        parts.append(_extend_part(part, layout, draft, part.pick(nodes), part.pick(earlier.feed_end)))
    return replace(earlier, positions=layout.positions, chunks=(), parts=tuple(parts), nodes=tuple(nodes))


def _extend_part(
    part: Part, layout: Layout, draft: Draft, nodes: Sequence[Sequence[int]], feed_end: Sequence[int]
) -> Part:
    """Add the new draft tokens of the sequences of a part, whose entries are `nodes`."""
    spans = part.pick(layout.spans)
    sizes = tuple(span.end - span.begin for span in spans)
    length = max(sizes)
    if not length:
        return replace(part, rows=replace(part.rows, num_new=0))
    device = layout.positions.device
    last = part.rows.num_entries - 1
    in_order = part.rows.is_chain and all(
        not size or (entries[span.first - 1] if span.first else end) == last
        for entries, size, span, end in zip(nodes, sizes, spans, feed_end, strict=True)
    )
    if draft.chain and in_order:
        rows = _chains((last + 1 + length,) * len(sizes), length, device)
    else:
        first = [span.first for span in spans]
        rows = add_nodes(part.rows, _parent_entries(nodes, feed_end, first, part.select(draft.parent), length))
    columns, unpadded = _columns([span.begin for span in spans], sizes, len(layout.positions), device)
    return Part(sequences=part.sequences, rows=rows, columns=columns, unpadded=unpadded)


def chain_rows(batch_size: int, size: int, device: torch.device) -> Rows:
    """Return the rows of sequences with chains of `size` new entries."""
    return _chains((size,) * batch_size, size, device)


def chunk_ends(start: int, feed: int) -> list[int]:
    """Return where the chunks of a feed of some tokens end. At least its last token remains to be staged."""
    last = start + feed - 1  # tokens up to the last one of the feed
    ends = list(range(start - start % CHUNK + CHUNK, last + 1, CHUNK))
    if feed > _MAX_FEED and last > (ends[-1] if ends else start):
        ends.append(last)
    return ends


def _chunks(row: int, span: SequenceSpan) -> list[Chunk]:
    stops = chunk_ends(span.start, span.end - span.begin - span.nodes)
    begins = [span.start, *stops]
    offset = span.begin - span.start
    return [Chunk(row, begin + offset, stop + offset, stop) for begin, stop in zip(begins, stops, strict=False)]


def _columns(
    begins: Sequence[int], sizes: Sequence[int], total: int, device: torch.device
) -> tuple[torch.Tensor | None, Unpadded | None]:
    """Return `Part.columns` and `Part.unpadded`."""
    length = max(sizes)
    is_padded = min(sizes) < length
    if not is_padded and length * len(sizes) == total:
        return None, None
    columns: list[int] = []
    for begin, size in zip(begins, sizes, strict=True):
        columns += [*range(begin, begin + size), *[0] * (length - size)]
    if not is_padded:
        return tree.upload(columns, device), None
    entries = [b * length + entry for b, size in enumerate(sizes) for entry in range(size)]
    unpadded = Unpadded(tree.upload(entries, device), tree.upload(tree.pick(columns, entries), device))
    return tree.upload(columns, device), unpadded


@lru_cache(256)
@torch.inference_mode(False)  # callers outside of inference mode use the cached tensors as well
def _chains(sizes: tuple[int, ...], num_new: int, device: torch.device) -> Rows:
    """Return the rows of chains of these lengths."""
    length = max(sizes)
    order = torch.arange(length, device=device)
    return Rows(
        ancestors=(order <= order[:, None]).expand(len(sizes), -1, -1),
        parent=(order - 1).expand(len(sizes), -1),
        num_new=num_new,
        is_chain=True,
    )


def _trees(ancestors: torch.Tensor, parents: torch.Tensor, feeds: Sequence[int], length: int) -> Rows:
    """Return the rows of trees of draft tokens, each after a feed."""
    batch_size, nodes = parents.shape
    device = parents.device
    ends = tree.upload(feeds, device)[:, None]
    order = torch.arange(length, device=device)
    in_feed = order < ends  # [B, E]
    node = (order - ends).clamp(0, max(nodes - 1, 0))  # [B, E] draft token of each entry
    if nodes:
        parent = torch.where(in_feed, order - 1, parents.gather(1, node) + ends)
        among_nodes = ancestors.gather(1, node[..., None].expand(-1, -1, nodes))
        among_nodes = among_nodes.gather(2, node[:, None].expand(-1, length, -1))
    else:
        parent = (order - 1).expand(batch_size, -1)
        among_nodes = torch.zeros(batch_size, length, length, dtype=torch.bool, device=device)
    in_order = order <= order[:, None]
    both_nodes = ~in_feed[:, :, None] & ~in_feed[:, None]
    return Rows(
        # Padding is numbered like the last draft token, but comes after it.
        ancestors=in_order & torch.where(both_nodes, among_nodes, in_feed[:, None]),
        parent=parent,
        num_new=length,
        is_chain=False,
    )


def _parent_entries(
    nodes: Sequence[Sequence[int]],
    feed_end: Sequence[int],
    first: Sequence[int],
    parents: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Return [B, L]: the entry before each new draft token. `first` is the first new one of each sequence."""
    device, size = parents.device, parents.shape[1]
    entries = tree.upload_rows(nodes, size, device)  # [B, N]
    ends = tree.upload(feed_end, device)[:, None]
    before = torch.where(parents < 0, ends, entries.gather(1, parents.clamp(min=0)))  # [B, N]
    index = tree.upload(first, device)[:, None] + torch.arange(length, device=device)
    return before.gather(1, index.clamp(max=size - 1))


def add_nodes(rows: Rows, parents: torch.Tensor) -> Rows:
    """Add new entries, whose parents are [B, L]."""
    batch_size, length = parents.shape
    staged = rows.num_entries
    ancestors = rows.ancestors.new_zeros(batch_size, staged + length, staged + length)
    ancestors[:, :staged, :staged] = rows.ancestors
    each = torch.arange(batch_size, device=parents.device)
    for new in range(staged, staged + length):
        ancestors[:, new] = ancestors[each, parents[:, new - staged]]
        ancestors[:, new, new].fill_(True)
    return Rows(
        ancestors=ancestors,
        parent=torch.cat([rows.parent, parents], 1),
        num_new=length,
        is_chain=False,
    )
