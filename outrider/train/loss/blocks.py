"""Unrolls a block head: blocks at random positions, filled in by one pass (DFlash, 2602.06036; DSpark, 2607.05147).

The hidden states of a sequence are projected once, for many blocks side by side. A block attends to the states before
it, and bidirectionally to itself, like the one block that the engine drafts at this position. Draft token k of a block
is trained after k given tokens, as the engine uses it after k accepted ones.

The papers weight draft token k by exp(-k / gamma), counted from 0. This is a loss decay of exp(-1 / gamma): 0.78 for
blocks of 7 draft tokens, 0.82 for 9 and 0.87 for 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.heads.modules.block import BlockHead
from outrider.heads.modules.layers import Attention
from outrider.train.loss.steps import Step, TrainingBatch, sample_columns

_MAX_BLOCKS = 512  # per sequence


def unroll_blocks(module: BlockHead, batch: TrainingBatch, steps: int, share: float) -> Iterator[Step]:
    """Yield the draft tokens 0, 1, ... of blocks at a share of the positions. A column is the same block in all steps.

    Args:
        module: the block head.
        batch: the sequences to train on.
        steps: the most steps.
        share: share of the trained positions at which a block begins, in (0, 1].
    """
    starts, valid = anchors(batch.loss_mask, share)
    out = _forward(module, batch, starts)
    rows = torch.arange(len(starts), device=starts.device)[:, None].expand_as(starts)
    last = batch.loss_mask.shape[1] - 1
    for index in range(min(steps, module.block.draft_tokens)):
        position = (starts + index).clamp(max=last)  # of the token before the draft token
        valid = valid & (starts + index <= last) & batch.loss_mask[rows, position]
        index_out = out[:, :, index][valid]
        previous_tokens = batch.tokens[rows, position][valid]
        yield Step(
            loss_mask=valid,
            logits=module.correct_logits(module.logits(index_out), previous_tokens),
            target=batch.target_probs_at(rows[valid], position[valid]),
            confidence=module.confidence(index_out, previous_tokens) if module.block.confidence else None,
        )


def anchors(loss_mask: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the positions at which blocks begin, at random.

    Args:
        loss_mask: [B, L] bool: whether to train on the distribution after a token.
        share: share of these positions to choose, in (0, 1].

    Returns:
        The positions [B, A] in ascending order, never the first of a sequence; and whether [B, A] they are trained.
        Sequences with fewer positions have padding at the end.
    """
    allowed = loss_mask.clone()
    allowed[:, 0] = False
    if share < 1:
        allowed &= torch.rand(allowed.shape).to(allowed.device) < share
    return sample_columns(allowed, _MAX_BLOCKS)


def _forward(module: BlockHead, batch: TrainingBatch, starts: torch.Tensor) -> torch.Tensor:
    """Return the outputs [B, A, draft tokens, H] of blocks that begin at positions `starts` [B, A]."""
    states = module.fuse_states(batch.aux_states)
    device = starts.device
    positions = torch.arange(states.shape[1], device=device)
    block_positions = starts[..., None] + torch.arange(module.block.size, device=device)
    state_kv = module.keys_and_values(states, positions.expand(len(states), -1))
    attention = _BlockAttention(state_kv, positions >= starts[..., None])
    first_tokens = batch.tokens.gather(1, starts)
    return module(first_tokens, block_positions.flatten(1), attention)  # type: ignore[no-any-return]


class _BlockAttention:
    """Attention of a block to the states before it and to itself."""

    def __init__(self, state_kv: Sequence[tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor) -> None:
        """Take the keys and values of states, and the attention mask.

        Args:
            state_kv: keys and values [B, Hkv, L, D] of the target's states, by layer.
            hidden: [B, A, L] bool: the states that a block does not attend to.
        """
        self._state_kv = state_kv
        self._hidden = hidden[:, None, None, :, None]

    def __call__(
        self,
        attention: Attention,
        query: torch.Tensor,  # [B, Hq, A * size, D]
        key: torch.Tensor,  # [B, Hkv, A * size, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        state_keys, state_values = (tensor[:, :, None] for tensor in self._state_kv[attention.layer_idx])
        length = state_keys.shape[3]  # of [B, Hkv, 1, L, D]
        rows, heads, columns, dim = key.shape
        blocks = self._hidden.shape[3]
        by_block = (blocks, columns // blocks)
        query = (query * dim**-0.5).view(rows, heads, -1, columns, dim)
        key, value = (tensor.reshape(rows, heads, 1, *by_block, dim) for tensor in (key, value))
        state_scores = (query @ state_keys.transpose(-1, -2)).view(rows, heads, -1, *by_block, length)
        block_scores = query.view(rows, heads, -1, *by_block, dim) @ key.transpose(-1, -2)
        # block_scores is [B, Hkv, G, A, size, size]
        scores = torch.cat([state_scores.masked_fill(self._hidden, -torch.inf), block_scores], -1)
        weights = scores.float().softmax(-1).to(value.dtype)
        from_states = weights[..., :length].flatten(3, 4) @ state_values
        from_block = (weights[..., length:] @ value).flatten(3, 4)
        return (from_states + from_block).flatten(1, 2)
