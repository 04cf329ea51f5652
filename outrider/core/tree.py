"""Build draft trees as tensors, cut them, and compute ancestors and depths."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from outrider.core.types import Batch, Draft, DraftKind, Packed, Round, Scores

T = TypeVar("T")


def upload(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy integers to the device without waiting for its pending work."""
    if device.type == "cpu" and dtype is torch.int64:
        return torch.from_numpy(np.array(numbers, dtype=np.int64))  # takes half the time of torch.tensor
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_rows(rows: Sequence[Sequence[int]], size: int, device: torch.device, filler: int = 0) -> torch.Tensor:
    """Copy rows of at most `size` integers to the device, as `upload` does. `filler` follows shorter rows."""
    return upload([[*row, *[filler] * (size - len(row))] for row in rows], device)


def pick(values: Sequence[T], indices: Iterable[int]) -> list[T]:
    """Return the values at these indices."""
    return [values[index] for index in indices]


@lru_cache(256)  # plain decoding asks for the same draft in every round
@torch.inference_mode(False)  # callers outside of inference mode use the cached tensors as well
def empty(batch_size: int, device: torch.device) -> Draft:
    """Return a draft without draft tokens for `batch_size` sequences."""
    no_nodes = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
    count = torch.zeros(batch_size, dtype=torch.int64, device=device)
    zeros = (0,) * batch_size
    return Draft(
        tokens=no_nodes, parent=no_nodes, count=count, kind=no_nodes, q=None, width=zeros, depth=zeros, chain=True
    )


def chain(
    tokens: torch.Tensor,  # [B, N]
    width: tuple[int, ...],  # [B]
    *,
    kind: torch.Tensor | None = None,  # [B, N]; None: DraftKind.ONE_HOT
    q: Packed | None = None,  # [B, N]
    accept_prob: tuple[tuple[float, ...], ...] | None = None,  # [B][width]
) -> Draft:
    """Return a draft of chains, with `width[b]` draft tokens for sequence b."""
    batch_size, size = tokens.shape
    return Draft(
        tokens=tokens,
        parent=_chain_parents(batch_size, size, tokens.device),
        count=_counts(width, tokens.device),
        kind=kinds(DraftKind.ONE_HOT, batch_size, size, tokens.device) if kind is None else kind,
        q=q,
        width=width,
        depth=width,
        chain=True,
        accept_prob=accept_prob,
    )


def one_hot_tree(
    tokens: torch.Tensor,  # [B, N]
    parent: torch.Tensor,  # [B, N]
    width: tuple[int, ...],  # [B]
    *,
    depth: tuple[int, ...] | None = None,  # [B]; None: at most the width
    accept_prob: tuple[tuple[float, ...], ...] | None = None,  # [B][width]
) -> Draft:
    """Return a draft of trees whose tokens were chosen without sampling. Sequence b has the first `width[b]` nodes."""
    return Draft(
        tokens=tokens,
        parent=parent,
        count=_counts(width, tokens.device),
        kind=kinds(DraftKind.ONE_HOT, *tokens.shape, tokens.device),
        q=None,
        width=width,
        depth=depth or width,
        chain=False,
        accept_prob=accept_prob,
    )


@lru_cache(1024)
@torch.inference_mode(False)
def _chain_parents(batch_size: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(-1, size - 1, device=device).repeat(batch_size, 1)


@lru_cache(1024)
@torch.inference_mode(False)
def _counts(width: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return upload(width, device)


@lru_cache(1024)
@torch.inference_mode(False)
def kinds(kind: DraftKind, batch_size: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the kinds [B, N] of draft tokens that all have the same kind."""
    return torch.full((batch_size, size), int(kind), device=device)


def cut(draft: Draft, width: tuple[int, ...]) -> Draft:
    """Keep the first `width[b]` draft tokens of sequence b, or all if it has fewer."""
    width = tuple(map(min, width, draft.width))
    if width == draft.width:
        return draft
    size = max(width)
    count = torch.minimum(draft.count, upload(width, draft.count.device))
    return replace(
        draft,
        tokens=draft.tokens[:, :size],
        parent=draft.parent[:, :size],
        count=count,
        kind=draft.kind[:, :size],
        q=None if draft.q is None else replace(draft.q, at=draft.q.at[:, :size]),
        width=width,
        depth=tuple(map(min, width, draft.depth)),
        accept_prob=_cut_rows(draft.accept_prob, width),
        source=_cut_rows(draft.source, width),
    )


def _cut_rows(rows: tuple[tuple[T, ...], ...] | None, width: tuple[int, ...]) -> tuple[tuple[T, ...], ...] | None:
    if rows is None:
        return None
    return tuple(values[:count] for values, count in zip(rows, width, strict=True))


def is_cut(draft: Draft, whole: Draft) -> bool:
    """Return whether `draft` is `whole` or a result of `cut` on it. They share memory."""
    return draft.tokens.data_ptr() == whole.tokens.data_ptr() and draft.size > 0


def valid_nodes(draft: Draft) -> torch.Tensor:
    """Return [B, N] bool: True for draft tokens, False for padding."""
    return torch.arange(draft.size, device=draft.count.device) < draft.count[:, None]


def ancestors(parent: torch.Tensor) -> torch.Tensor:
    """Return [B, N, N] bool: `out[b, i, j]` is True if node j is on the path from the root to node i, or is i.

    Each matrix product doubles the length of the paths, so log2(N) products suffice.
    """
    order = torch.arange(parent.shape[1], device=parent.device)
    reach = (order[:, None] == order) | (parent[..., None] == order)
    for _ in range(parent.shape[1].bit_length()):
        reach = (reach.float() @ reach.float()) > 0
    return reach


def path(parents: Sequence[int], node: int) -> list[int]:
    """Return the path from the root's child to `node` in one tree; [] for -1, the root."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def depths(draft: Draft) -> torch.Tensor:
    """Return [B, N] int64, the depth of each node; 1 for a child of the root."""
    if draft.chain:
        return torch.arange(1, draft.size + 1, device=draft.parent.device).expand_as(draft.parent)
    return ancestors(draft.parent).sum(-1)


def prefill_round(batch: Batch, draft: Draft, scores: Scores) -> Round:
    """Return the round of sequences that are still prefilling: nothing is accepted or emitted."""
    nothing = ((),) * len(batch.seqs)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=nothing,
        emitted=nothing,
        sampled_logprob=nothing,
        failed=(False,) * len(batch.seqs),
    )
