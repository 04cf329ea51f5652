"""Passes with parts of long prompts on the Triton kernels. They have no fixed shape.

Their tokens are packed without padding, and their attention runs over groups of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from outrider.core.cache import SequenceSpan, node_order, pack
from outrider.core.tree import pick, upload
from outrider.core.types import Batch, Draft, DraftBudget
from outrider.errors import UnsupportedModel
from outrider.models.cache.device_pages import DevicePagedCache
from outrider.models.triton.passes import BLOCK_ROWS, MAX_COLUMNS, PADDING, Rows, valid_ids


def feeds_long_prompt(batch: Batch, first: int) -> bool:
    """Return whether a pass has tokens of a long prompt, which run in another way than those of decoding.

    That depends on the request alone, so the results of a sequence do not depend on the other sequences.
    """
    if first >= 0:
        return False
    lengths = [len(seq.request.prompt_token_ids) for seq in batch.seqs]
    return max(lengths) > MAX_COLUMNS and any(_prompt_left(batch, b) for b in range(len(lengths)))


def whole_prompts(batch: Batch, draft: Draft) -> list[int]:
    """Return the sequences whose feed is a large part of a long prompt. Each of them is a pass of its own.

    []: a sequence feeds few tokens of a long prompt, or also others. Then all tokens run in one pass
    without a fixed shape, with the same results.
    """
    left = [_prompt_left(batch, b) for b in range(len(batch.seqs))]
    found = [b for b, tokens in enumerate(left) if tokens]
    for b in found:
        is_small = left[b] <= BLOCK_ROWS // 2 and len(found) > 1  # a pass of fixed shape would have much padding
        if is_small or left[b] < len(batch.feed[b]) or draft.width[b]:
            return []
    return found


def rows_of(batch: Batch, draft: Draft, chosen: Sequence[int], device: torch.device) -> tuple[Batch, Draft]:
    """Return some sequences of a batch, and their draft tokens without what only verification needs."""
    index = upload(chosen, device)
    part = replace(
        batch,
        seqs=tuple(pick(batch.seqs, chosen)),
        start=tuple(pick(batch.start, chosen)),
        feed=tuple(pick(batch.feed, chosen)),
        budget=DraftBudget(tuple(pick(batch.draft_budget, chosen))),
    )
    tensors: dict[str, Any] = {name: getattr(draft, name)[index] for name in ("tokens", "parent", "count", "kind")}
    width, depth = tuple(pick(draft.width, chosen)), tuple(pick(draft.depth, chosen))
    return part, replace(draft, **tensors, width=width, depth=depth, q=None, accept_prob=None, source=None)


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
        self._feeds = valid_ids(batch.feed) if first < 0 else ((),) * len(batch.seqs)
        self._prompts = [_prompt_left(batch, b) if first < 0 else 0 for b in range(len(batch.seqs))]
        self._size = draft.size
        self._parents = draft.parent.tolist() if draft.size and not draft.chain else None

    def source(self, b: int) -> list[int]:
        """Return the ids of the tokens of a sequence, or ~i for draft token i of the flat draft."""
        span = self.spans[b]
        node = ~(b * self._size + span.first)
        return [*self._feeds[b], *range(node, node - span.nodes, -1)]

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
        entry += [*columns.entries(piece), *[PADDING] * padding]
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
