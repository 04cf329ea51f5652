"""Trees of guesses as tensors: making them, and asking who descends from whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from outrider.core.types import Batch, Draft, DraftKind, Packed, Round, Scores


def near(device: torch.device) -> bool:
    """Whether the host may look at a tensor of the device without waiting."""
    return device.type == "cpu"


def upload(
    numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers of the host as a tensor on the device, without waiting for what the device is still doing."""
    if device.type == "cpu" and dtype is torch.int64:
        return torch.from_numpy(np.array(numbers, dtype=np.int64))  # half of what torch.tensor takes
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@lru_cache(256)  # the same in every round that guesses nothing
@torch.inference_mode(False)  # so that everybody may use it, whoever asked first
def empty(rows: int, device: torch.device) -> Draft:
    """No guesses for `rows` rows."""
    none = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    count = torch.zeros(rows, dtype=torch.int64, device=device)
    zero = (0,) * rows
    return Draft(tokens=none, parent=none, count=count, kind=none, q=None, width=zero, depth=zero, chain=True)


def chain(
    tokens: torch.Tensor,  # [B, N]
    width: tuple[int, ...],  # [B]
    *,
    law: torch.Tensor | None = None,  # [B, N]; None: all were chosen
    q: Packed | None = None,  # [B, N]
    chance: tuple[tuple[float, ...], ...] | None = None,  # [B][width]
) -> Draft:
    """One guess after another, `width[b]` of them in row b."""
    rows, size = tokens.shape
    return Draft(
        tokens=tokens,
        parent=_row_after_row(rows, size, tokens.device),
        count=upload(width, tokens.device),
        kind=_picked(rows, size, tokens.device) if law is None else law,
        q=q,
        width=width,
        depth=width,
        chain=True,
        accept_prob=chance,
    )


def chosen(
    tokens: torch.Tensor,  # [B, N]
    parent: torch.Tensor,  # [B, N]
    width: tuple[int, ...],  # [B]
    *,
    depth: tuple[int, ...] | None = None,  # [B]; None: the width is what is known of it
    chance: tuple[tuple[float, ...], ...] | None = None,  # [B][width]
) -> Draft:
    """Trees of guesses that were picked, not drawn; row b has the first `width[b]` of them."""
    return Draft(
        tokens=tokens,
        parent=parent,
        count=upload(width, tokens.device),
        kind=_picked(*tokens.shape, tokens.device),
        q=None,
        width=width,
        depth=depth or width,
        chain=False,
        accept_prob=chance,
    )


@lru_cache(1024)
@torch.inference_mode(False)
def _row_after_row(rows: int, size: int, device: torch.device) -> torch.Tensor:
    """Parents of chains."""
    return torch.arange(-1, size - 1, device=device).repeat(rows, 1)


@lru_cache(1024)
@torch.inference_mode(False)
def _picked(rows: int, size: int, device: torch.device) -> torch.Tensor:
    """Laws of guesses that were chosen."""
    return torch.full((rows, size), int(DraftKind.ONE_HOT), device=device)


def cut(draft: Draft, width: tuple[int, ...]) -> Draft:
    """The first `width[b]` guesses of row b, or all that it has."""
    width = tuple(map(min, width, draft.width))
    if width == draft.width:
        return draft
    size, count = max(width), torch.minimum(draft.count, upload(width, draft.count.device))
    chance = draft.accept_prob
    return replace(
        draft,
        tokens=draft.tokens[:, :size],
        parent=draft.parent[:, :size],
        count=count,
        kind=draft.kind[:, :size],
        q=None if draft.q is None else replace(draft.q, at=draft.q.at[:, :size]),
        width=width,
        depth=tuple(map(min, width, draft.depth)),
        accept_prob=None if chance is None else tuple(row[:w] for row, w in zip(chance, width, strict=True)),
        source=None if draft.source is None else tuple(row[:w] for row, w in zip(draft.source, width, strict=True)),
    )


def is_cut(draft: Draft, whole: Draft) -> bool:
    """Whether `draft` is `whole`, or what `cut` left of it: they share their memory."""
    return draft.tokens.data_ptr() == whole.tokens.data_ptr() and draft.size > 0


def live(draft: Draft) -> torch.Tensor:
    """[B, N] bool: which nodes are guesses, and which are padding."""
    return torch.arange(draft.size, device=draft.count.device) < draft.count[:, None]


def ancestors(parent: torch.Tensor) -> torch.Tensor:
    """[B, N, N] bool: `out[b, i, j]` where node j lies on the path from the root to node i, i itself included.

    In log N products, of the paths of up to 1, 2, 4, ... steps.
    """
    order = torch.arange(parent.shape[1], device=parent.device)
    reach = (order[:, None] == order) | (parent[..., None] == order)
    for _ in range(parent.shape[1].bit_length()):
        reach = (reach.float() @ reach.float()) > 0
    return reach


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes of one row from the root's child down to `node`, by their parents; none for -1, the root itself."""
    out = []
    while node >= 0:
        out.append(node)
        node = parents[node]
    return out[::-1]


def depths(draft: Draft) -> torch.Tensor:
    """[B, N] int64: guesses on the path from the root, the node itself counted; 1 for a child of the root."""
    if draft.chain:
        return torch.arange(1, draft.size + 1, device=draft.parent.device).expand_as(draft.parent)
    return ancestors(draft.parent).sum(-1)


def fed_round(batch: Batch, draft: Draft, scores: Scores) -> Round:
    """The round of rows that only feed: nothing accepted, nothing emitted."""
    none = ((),) * len(batch.seqs)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=none,
        emitted=none,
        sampled_logprob=none,
        failed=(False,) * len(batch.seqs),
    )
