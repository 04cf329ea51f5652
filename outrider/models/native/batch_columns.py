"""The columns of a pass over the feeds and the draft tokens of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.cache import SequenceSpan, node_order, pack
from outrider.core.types import Batch, Draft
from outrider.models.native.columns import Columns


class BatchColumns(NamedTuple):
    """The columns of a pass, and where they are."""

    columns: Columns
    spans: list[SequenceSpan]  # [B]
    order: list[int] | None  # index of the logits of each node, as `node_order` returns it


def columns_of(batch: Batch, draft: Draft, first: int, vocab: int) -> BatchColumns:
    """Return the columns of a pass.

    Args:
        batch: B sequences with their feeds.
        draft: at most N draft tokens per sequence.
        first: -1: run the feeds and all draft tokens; else only draft tokens from this node on.
        vocab: number of ids of the embedding.
    """
    spans = pack(batch, draft.width, first)
    tokens: list[int] = []
    for feed, drafted, span in zip(batch.feed, draft.host_tokens(), spans, strict=True):
        if first < 0:
            tokens += feed
        tokens += drafted[span.first : span.first + span.nodes]
    columns = Columns.consecutive(_valid_ids(tokens, vocab), spans)
    size = draft.size
    if size and not draft.chain:
        _branch(columns, spans, draft.parent.tolist())
    num_nodes = size - max(first, 0) + (first < 0)
    return BatchColumns(columns, spans, node_order(spans, num_nodes))


def _valid_ids(tokens: Sequence[int], vocab: int) -> Sequence[int]:
    """Clamp ids to those of the embedding. A sequence may hold larger ids if another model has a larger vocabulary."""
    if min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab:
        return tokens
    return [min(max(token, 0), vocab - 1) for token in tokens]


def _branch(columns: Columns, spans: Sequence[SequenceSpan], parents: Sequence[Sequence[int]]) -> None:
    """Let the draft tokens attend to the committed tokens and to their own ancestors only. `parents` is [B, N]."""
    columns.position = array("i", columns.position)
    tail_begin = array("i", [0])
    for span, tree_parents in zip(spans, parents, strict=True):
        node_column = span.end - span.nodes - span.first  # of node 0, whether it is in the pass or not
        tail_begin.extend([len(columns.tail)] * (span.end - span.nodes - span.begin))
        paths: list[list[int]] = []  # entries of each node's ancestors and itself
        for node in range(span.first + span.nodes):
            parent = tree_parents[node]
            ancestors = paths[parent] if parent >= 0 else []
            paths.append([*ancestors, span.base + node])
            if node >= span.first:
                columns.position[node_column + node] = span.base + len(ancestors)
                columns.prefix[node_column + node] = span.base
                columns.tail.extend(paths[node])
                tail_begin.append(len(columns.tail))
    columns.tail_begin = tail_begin
