"""The inputs of a forward pass of fixed shape on the Triton kernels: where each token is written, and what it sees.

A pass has R rows of C columns. Row r is sequence r of the batch, and unused columns are padding.
Its inputs are in buffers, so that it can be recorded once and replayed for sequences of any length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.core.cache import pack
from outrider.core.tree import ancestors
from outrider.core.types import Batch, Draft

BLOCK_ROWS = 512  # tokens of a pass over a prompt, as many as a round has by default
MAX_COLUMNS = 64  # tokens of a row whose visibility is in one word
PADDING = -1  # entry of a column without a token
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of equal numbers of columns, for one call of the attention kernels. T = R * C tokens."""

    rows: int
    columns: int
    entry: torch.Tensor  # [T] int32 the entry of the sequence where a token is written; -1: padding
    position: torch.Tensor  # [T] int32
    prefix: torch.Tensor  # [R] int32: every token of a row sees the entries before it
    bits: torch.Tensor  # [T, 1] int64: bit j: the token sees entry prefix + j, too; 0 for padding
    table: torch.Tensor  # [R, M] int32 block tables
    is_prompt: bool = False  # whether each token sees all before it; bits that are not 0 then mark tokens
    take: torch.Tensor | None = None  # [T] int64 the token of the pass of each column; None: the rows are the pass
    real: torch.Tensor | None = None  # int64 the columns that are no padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shape of a pass."""

    rows: int
    columns: int
    nodes: int  # draft tokens of a row at most, also those that are not scored
    trees: bool = False
    steps: int = 0  # length of a greedy draft; 0: the pass scores
    vocab: int = 0  # drafted ids are below it; 0: all
    is_prompt: bool = False  # whether the row is a part of a long prompt; only the last token has logits


PROMPT_BUCKET = Bucket(rows=1, columns=BLOCK_ROWS, nodes=0, is_prompt=True)


class BlockTables(Protocol):
    """The part of `DevicePagedCache` that passes need."""

    device: torch.device
    allocations: int

    @property
    def reach(self) -> int:
        """Blocks of a full context."""

    def rows(self, slots: Sequence[int]) -> array[int]:
        """Return the block tables of slots."""


class Buffers:
    """The inputs of a pass of one bucket."""

    def __init__(self, bucket: Bucket, reach: int, device: torch.device, states: tuple[torch.Tensor, ...] = ()) -> None:
        """Allocate the inputs.

        Args:
            bucket: the shape of the pass.
            reach: blocks of a block table.
            device: where the pass runs.
            states: memory of what a draft head starts from besides: hidden states [T, ...], and what its kind needs.
        """
        self.bucket = bucket
        self.states = states
        rows, columns = bucket.rows, bucket.columns
        grid = rows * columns
        # In this order: the id of each token, or ~i for draft token i of the flat draft; its entry;
        # the number of tokens in the feed of each row; the entry of node 0; the first entry of the
        # row; its budget; the token of each node; the block tables.
        self._sizes = [grid, grid, rows, rows, rows, rows, grid, rows * reach]
        self._integers = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._parts = torch.split(self._integers, self._sizes)
        self._draft = torch.zeros(rows, max(bucket.nodes, 1), dtype=torch.int64, device=device)
        self._parents = torch.full_like(self._draft, -1)
        self._reach = reach
        self._parts[1].fill_(PADDING)

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._integers, self._draft, self._parents, *self.states))

    def fill(self, batch: Batch, draft: Draft, first: int, cache: BlockTables) -> None:
        """Copy the integers of a round to the device, in one copy, and its draft tokens."""
        bucket = self.bucket
        integers = _integers(bucket, batch, draft, first)
        integers += cache.rows([seq.slot for seq in batch.seqs])
        integers += array("i", bytes(4 * self._reach * (bucket.rows - len(batch.seqs))))
        host = torch.frombuffer(integers, dtype=torch.int32)
        if self._integers.is_cuda:
            host = host.pin_memory()
        self._integers.copy_(host, non_blocking=True)
        if draft.size:
            self._draft[: len(draft.tokens), : draft.size] = draft.tokens
            if bucket.trees:
                self._parents[: len(draft.tokens), : draft.size] = draft.parent

    @property
    def budget(self) -> torch.Tensor:
        """[R] int32 draft tokens of each row."""
        return self._parts[5]

    @property
    def base(self) -> torch.Tensor:
        """[R] int32 entry of node 0."""
        return self._parts[3]

    @property
    def nodes(self) -> torch.Tensor:
        """[R * C] int32 the token of each node. Padding repeats node 0."""
        return self._parts[6]

    @property
    def table(self) -> torch.Tensor:
        return self._parts[7].view(self.bucket.rows, -1)

    def step(self, number: int) -> Rows:
        """Return the rows of draft token `number` - 1 of a chain as the only column."""
        position = self.base + (number - 1)
        return Rows(
            rows=self.bucket.rows,
            columns=1,
            entry=position.masked_fill(self.budget <= number, PADDING),
            position=position,
            prefix=position,
            bits=torch.ones(self.bucket.rows, 1, dtype=torch.int64, device=position.device),
            table=self.table,
        )

    def last(self) -> torch.Tensor:
        """Return the end of each feed [R] int64, which is node 0."""
        return self.nodes.view(self.bucket.rows, -1)[:, 0].long()

    def tokens(self) -> torch.Tensor:
        """Return the token ids [T] int64."""
        source = self._parts[0].long()
        drafted = self._draft.flatten()[(~source).clamp(min=0)]
        return torch.where(source < 0, drafted, source)

    def layout(self) -> Rows:
        """Return the rows of the pass, with the visibility of each token."""
        rows, columns = self.bucket.rows, self.bucket.columns
        source, entry, fed, base, start, _, _, _ = self._parts
        column = torch.arange(columns, device=entry.device)
        bits = _ones(column + 1).expand(rows, columns)
        position = entry.clamp(min=0).view(rows, columns)
        if self.bucket.trees:
            above = ancestors(self._parents)  # [R, N, N], with the node itself
            is_drafted = source.view(rows, columns) < 0
            node = (~source.view(rows, columns)).clamp(min=0).long()  # of the flat draft
            powers = torch.ones((), dtype=torch.int64, device=entry.device) << torch.arange(
                above.shape[-1], device=entry.device
            )
            own = (above * powers).sum(-1).flatten()[node] << fed[:, None].long()
            depth = above.sum(-1).flatten()[node]
            bits = torch.where(is_drafted, own | _ones(fed.long())[:, None], bits)
            position = torch.where(is_drafted, base[:, None] - 1 + depth.int(), position)
        bits = bits.masked_fill(entry.view(rows, columns) < 0, 0)
        return Rows(
            rows=rows,
            columns=columns,
            entry=entry,
            position=position.flatten(),
            prefix=start,
            bits=bits.reshape(-1, 1).contiguous(),
            table=self.table,
            is_prompt=self.bucket.is_prompt,
        )


def _ones(count: torch.Tensor) -> torch.Tensor:
    """Return words with the lowest `count` bits set, up to 64."""
    one = torch.ones((), dtype=torch.int64, device=count.device)
    return torch.where(count >= MAX_COLUMNS, -one, (one << count.clamp(max=MAX_COLUMNS - 1)) - 1)


def valid_ids(feeds: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    """Clamp ids to 31 bits. A sequence may hold larger ids if another model has a larger vocabulary."""
    given = list(filter(None, feeds))
    if min(map(min, given), default=0) >= 0 and max(map(max, given), default=0) <= _LARGEST_ID:
        return feeds
    return [tuple(map(_valid_id, feed)) for feed in feeds]


def _valid_id(token: int) -> int:
    return min(max(token, 0), _LARGEST_ID)


def _integers(bucket: Bucket, batch: Batch, draft: Draft, first: int) -> array[int]:
    """Return the integers of a round without the block tables, in the order of `Buffers`."""
    size = bucket.columns
    source, entry, nodes = [0] * (bucket.rows * size), [PADDING] * (bucket.rows * size), [0] * (bucket.rows * size)
    rows: list[tuple[int, int, int, int]] = []  # fed, base, start, budget
    feeds = valid_ids(batch.feed) if first < 0 else ((),) * len(batch.seqs)
    trees = bucket.trees and first >= 0
    spans = pack(batch, draft.width, first)
    for b, (span, fed, budget) in enumerate(zip(spans, feeds, batch.draft_budget, strict=True)):
        begin = b * size
        end = begin + span.end - span.begin
        source[begin : begin + len(fed)] = fed
        if span.nodes:
            node = ~(b * bucket.nodes + span.first)
            source[end - span.nodes : end] = range(node, node - span.nodes, -1)
        entry[begin:end] = range(span.start, span.start + end - begin)
        output = end - span.num_outputs  # the first node; padding repeats it
        nodes[begin : begin + size] = [*range(output, end), *[output] * (size - span.num_outputs)]
        rows.append((len(fed), span.base, span.base if trees else span.start, budget))
    rows += [(0, 0, 0, 0)] * (bucket.rows - len(spans))
    columns = array("i", [value for part in zip(*rows, strict=True) for value in part])
    return array("i", source + entry) + columns + array("i", nodes)
