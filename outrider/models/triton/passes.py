"""The columns of a forward pass on the Triton kernels: where each token is written, and what it sees.

A pass of fixed shape has R rows of C columns. Row r is sequence r of the batch, and unused columns
are padding. Its inputs are in buffers, so that it can be recorded once and replayed for sequences
of any length. A pass with long feeds has no fixed shape. Its tokens are packed without padding, and
its attention runs over groups of rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from outrider.core.cache import SequenceSpan, node_order, pack
from outrider.core.tree import ancestors, upload
from outrider.core.types import Batch, Draft
from outrider.errors import UnsupportedModel
from outrider.models.cache.device_pages import DevicePagedCache

MAX_COLUMNS = 64  # tokens of a row whose visibility is in one word
_PADDING = -1  # entry of a column without a token
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


class Buffers:
    """The inputs of a pass of one bucket."""

    def __init__(self, bucket: Bucket, reach: int, device: torch.device, states: torch.Tensor | None = None) -> None:
        """Allocate the inputs.

        Args:
            bucket: the shape of the pass.
            reach: blocks of a block table.
            device: where the pass runs.
            states: [T, ...] memory of the hidden states that a draft head starts from.
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
        self._parts[1].fill_(_PADDING)

    def bytes(self) -> int:
        own = (self._integers, self._draft, self._parents, self.states)
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    def fill(self, batch: Batch, draft: Draft, first: int, cache: DevicePagedCache) -> None:
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
            entry=position.masked_fill(self.budget <= number, _PADDING),
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
        )


def _ones(count: torch.Tensor) -> torch.Tensor:
    """Return words with the lowest `count` bits set, up to 64."""
    one = torch.ones((), dtype=torch.int64, device=count.device)
    return torch.where(count >= MAX_COLUMNS, -one, (one << count.clamp(max=MAX_COLUMNS - 1)) - 1)


def _valid(tokens: Sequence[int]) -> Sequence[int]:
    """Clamp ids to 31 bits. A sequence may hold larger ids if another model has a larger vocabulary."""
    if min(tokens, default=0) >= 0 and max(tokens, default=0) <= _LARGEST_ID:
        return tokens
    return [min(max(token, 0), _LARGEST_ID) for token in tokens]


def _integers(bucket: Bucket, batch: Batch, draft: Draft, first: int) -> array[int]:
    """Return the integers of a round without the block tables, in the order of `Buffers`."""
    size = bucket.columns
    unused = bucket.rows - len(batch.seqs)
    source, entry, nodes = array("i"), array("i"), array("i")
    rows: list[tuple[int, int, int, int]] = []  # fed, base, start, budget
    width = draft.size
    trees = bucket.trees
    for b, span in enumerate(pack(batch, draft.width, first)):
        length = span.end - span.begin
        padding = size - length
        fed = batch.feed[b] if first < 0 else ()
        node = ~(b * bucket.nodes + span.first) if width else 0
        source.extend((*_valid(fed), *range(node, node - span.nodes, -1), *[0] * padding))
        entry.extend((*range(span.start, span.start + length), *[_PADDING] * padding))
        begin = b * size
        outputs = [begin - span.begin + column for column in span.outputs] or [begin]
        nodes.extend((*outputs, *outputs[:1] * (size - len(outputs))))
        start = span.base if trees and first >= 0 else span.start
        rows.append((len(fed), span.base, start, batch.draft_budget[b]))
    source.extend([0] * (unused * size))
    entry.extend([_PADDING] * (unused * size))
    nodes.extend([0] * (unused * size))
    rows += [(0, 0, 0, 0)] * unused
    columns = array("i", [value for part in zip(*rows, strict=True) for value in part])
    return source + entry + columns + nodes


def feeds_long_prompt(batch: Batch, first: int) -> bool:
    """Return whether a pass has tokens of a long prompt, which run in another way than those of decoding.

    That depends on the request alone, so the results of a sequence do not depend on the other sequences.
    """
    return first < 0 and any(_prompt_left(batch, b) for b in range(len(batch.seqs)))


def _prompt_left(batch: Batch, b: int) -> int:
    """Return the tokens of a long prompt in the feed of a sequence."""
    length = len(batch.seqs[b].request.prompt_token_ids)
    return min(max(length - batch.start[b], 0), len(batch.feed[b])) if length > MAX_COLUMNS else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedPass:
    """A pass without a fixed shape: T tokens without padding. Those of long prompts come first."""

    tokens: torch.Tensor  # [T] int64
    prompt_tokens: int  # the first tokens, of long prompts
    groups: list[Rows]
    place: torch.Tensor  # [T] int64 the token of each column, in the order of `spans`
    keep: torch.Tensor  # [K] int64 the columns whose logits are needed
    nodes: torch.Tensor | None  # [B, N] int64 indices into `keep`; None: in the order of `keep`
    spans: Sequence[SequenceSpan]

    def positions(self) -> torch.Tensor:
        """Return the position of each token [T] int32."""
        positions = torch.zeros(self.tokens.shape, dtype=torch.int32, device=self.tokens.device)
        for group in self.groups:
            assert group.take is not None
            assert group.real is not None
            positions[group.take[group.real]] = group.position[group.real]
        return positions

    def per_node(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange [K, ...] of the kept tokens to [B, N, ...] of the nodes."""
        if self.nodes is not None:
            return values[self.nodes]
        return values.view(len(self.spans), -1, *values.shape[1:])


class _Piece(NamedTuple):
    """Consecutive columns of one sequence."""

    b: int
    skip: int  # columns of the sequence before it
    length: int
    is_prompt: bool


def ragged_pass(batch: Batch, draft: Draft, first: int, cache: DevicePagedCache) -> RaggedPass:
    """Pack the tokens of a pass. Pieces of long prompts are rows of their own, and all others are rows of one group."""
    device = cache.device
    spans = pack(batch, draft.width, first)
    columns = _Columns(batch, draft, first, spans)
    pieces = [piece for b in range(len(spans)) for piece in columns.pieces(b)]
    pieces.sort(key=lambda piece: not piece.is_prompt)
    offsets = [0, *accumulate(piece.length for piece in pieces)]
    place = [0] * offsets[-1]
    for piece, offset in zip(pieces, offsets, strict=False):
        begin = spans[piece.b].begin + piece.skip
        place[begin : begin + piece.length] = range(offset, offset + piece.length)
    placed = list(zip(pieces, offsets, strict=False))
    groups = [_group(columns, [each], cache) for each in placed if each[0].is_prompt]
    if others := [each for each in placed if not each[0].is_prompt]:
        groups.append(_group(columns, others, cache))  # after the prompts that its tokens see
    order = node_order(spans, draft.size - max(first, 0) + (first < 0))
    sources = [columns.source(b) for b in range(len(spans))]
    parts = [sources[piece.b][piece.skip : piece.skip + piece.length] for piece in pieces]
    source = upload([token for part in parts for token in part], device)
    tokens = source
    if draft.size:
        tokens = torch.where(source < 0, draft.tokens.flatten()[(~source).clamp(min=0)], source)
    return RaggedPass(
        tokens=tokens,
        prompt_tokens=sum(piece.length for piece in pieces if piece.is_prompt),
        groups=groups,
        place=upload(place, device),
        keep=upload([column for span in spans for column in span.outputs], device),
        nodes=None if order is None else upload(order, device).view(len(spans), -1),
        spans=spans,
    )


class _Columns:
    """The columns of the sequences of a pass without a fixed shape."""

    def __init__(self, batch: Batch, draft: Draft, first: int, spans: Sequence[SequenceSpan]) -> None:
        self.slots = [seq.slot for seq in batch.seqs]
        self.spans = spans
        self._feeds = batch.feed if first < 0 else ((),) * len(batch.seqs)
        self._prompts = [_prompt_left(batch, b) if first < 0 else 0 for b in range(len(batch.seqs))]
        self._size = draft.size
        self._parents = draft.parent.tolist() if draft.size and not draft.chain else None

    def source(self, b: int) -> list[int]:
        """Return the ids of the tokens of a sequence, or ~i for draft token i of the flat draft."""
        span = self.spans[b]
        node = ~(b * self._size + span.first)
        return [*_valid(self._feeds[b]), *range(node, node - span.nodes, -1)]

    def pieces(self, b: int) -> list[_Piece]:
        """Return the pieces of a sequence: of its prompt, if that is long, and the rest, with the nodes of a tree."""
        span = self.spans[b]
        length = span.end - span.begin
        if span.first + span.nodes > MAX_COLUMNS and self._parents is not None:
            raise UnsupportedModel(f"the Triton kernels take trees of at most {MAX_COLUMNS} draft tokens")
        skip = self._prompts[b]
        if length - skip > MAX_COLUMNS:  # generated tokens that are computed again
            skip = length - span.nodes if span.nodes else length
        cuts = [_Piece(b, 0, skip, is_prompt=True), _Piece(b, skip, length - skip, is_prompt=False)]
        return [piece for piece in cuts if piece.length]

    def entries(self, piece: _Piece) -> range:
        """Return the entries where the tokens of a piece are written."""
        start = self.spans[piece.b].start + piece.skip
        return range(start, start + piece.length)

    def visibility(self, piece: _Piece) -> tuple[int, list[int], list[int]]:
        """Return the prefix of a piece, and the bits and position of each of its tokens."""
        span = self.spans[piece.b]
        entries = self.entries(piece)
        if piece.is_prompt:  # causal
            return entries.start, [1] * piece.length, list(entries)
        if self._parents is None or not span.nodes:
            return entries.start, [(1 << column + 1) - 1 for column in range(piece.length)], list(entries)
        fed = span.end - span.begin - span.nodes - piece.skip
        prefix = span.start + piece.skip if span.start < span.base and fed else span.base
        bits = [(1 << column + 1) - 1 for column in range(fed)]
        own: list[int] = []
        depths: list[int] = []
        for node, parent in enumerate(self._parents[piece.b][: span.first + span.nodes]):
            own.append((own[parent] if parent >= 0 else 0) | 1 << node)
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        drafted = range(span.first, span.first + span.nodes)
        bits += [own[node] << fed | (1 << fed) - 1 for node in drafted]
        return prefix, bits, [*entries[:fed], *(span.base - 1 + depths[node] for node in drafted)]


def _group(columns: _Columns, placed: Sequence[tuple[_Piece, int]], cache: DevicePagedCache) -> Rows:
    """Return pieces as rows, with the token of the pass at which each begins."""
    device = cache.device
    size = max(piece.length for piece, _ in placed)
    entry, position, bits, prefix, take, real = (list[int]() for _ in range(6))
    for row, (piece, begin) in enumerate(placed):
        padding = size - piece.length
        start, words, positions = columns.visibility(piece)
        prefix.append(start)
        entry += [*columns.entries(piece), *[_PADDING] * padding]
        position += positions + [0] * padding
        bits += [*map(_signed, words), *[0] * padding]
        take += [*range(begin, begin + piece.length), *[begin] * padding]
        real += range(row * size, row * size + piece.length)
    slots = [columns.slots[piece.b] for piece, _ in placed]
    return Rows(
        rows=len(placed),
        columns=size,
        entry=upload(entry, device, torch.int32),
        position=upload(position, device, torch.int32),
        prefix=upload(prefix, device, torch.int32),
        bits=upload(bits, device)[:, None],
        table=upload(cache.rows(slots), device, torch.int32).view(len(placed), -1),
        is_prompt=placed[0][0].is_prompt,
        take=upload(take, device),
        real=upload(real, device),
    )


def _signed(word: int) -> int:
    """Return 64 bits as a signed integer."""
    return word - (1 << 64) if word >= 1 << 63 else word
