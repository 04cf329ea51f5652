"""Unrolls a head with mask tokens: masks after random columns, in one pass with the sequence (P-EAGLE, 2602.01469).

The columns of a sequence come first, with causal attention. The masks of a chosen column follow. They attend to the
sequence up to their column and to the masks before them, as in the engine. Mask k is trained after k given tokens, as
the engine uses it after k accepted ones, but it attends to none of them.

The paper leaves out more of the deeper masks. Here a share of the columns has all of its masks,
which costs the same work. The weight of these columns makes up for the others.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.layers import Attention
from outrider.train.loss.steps import Chains, Step, TrainingBatch, all_columns_step

MAX_COLUMNS = 512  # with masks, per sequence


def unroll_masks(module: AutoregressiveHead, batch: TrainingBatch, steps: int, later: float) -> Iterator[Step]:
    """Yield the first draft token of all columns, then those of the masks after a share `later` of the columns."""
    assert module.description.masks is not None
    states = module.fuse_states(batch.aux_states[:, :-1])
    rows, size = states.shape[:2]
    masks = max(min(steps, module.description.masks.draft_tokens, size) - 1, 0)
    chains = Chains.of(batch.loss_mask[:, 1:], later, MAX_COLUMNS)
    device = states.device
    count = chains.columns.shape[1]
    mask_tokens = batch.tokens.new_full((rows, count * masks), module.description.masks.token)
    mask_states = module.mask_state().to(states.dtype).expand(rows, count * masks, -1)
    depths = torch.arange(1, 1 + masks, device=device)
    mask_positions = (chains.columns[..., None] + depths).flatten(1)
    positions = torch.arange(size, device=device).expand(rows, -1)
    out = module(
        torch.cat([batch.tokens[:, 1 : 1 + size], mask_tokens], 1),
        torch.cat([states, mask_states], 1),
        torch.cat([positions, mask_positions], 1),
        _MaskAttention(size, chains.columns),
    )
    yield all_columns_step(batch, 0, out, module.logits)
    mask_out = out[:, size:].reshape(rows, count, masks, out.shape[-1])
    for index in range(1, 1 + masks):
        yield chains.step(batch, index, mask_out[:, :, index - 1], module.logits)


class _MaskAttention:
    """Causal attention of the sequence, and attention of masks to the sequence before them and to earlier masks."""

    def __init__(self, size: int, columns: torch.Tensor) -> None:
        """Take the number of columns of each sequence, and the columns [B, A] that have masks."""
        self._size = size
        self._hidden = (torch.arange(size, device=columns.device) > columns[..., None])[:, None, None, :, None]

    def __call__(
        self,
        attention: Attention,
        query: torch.Tensor,  # [B, Hq, C + A * masks, D]
        key: torch.Tensor,  # [B, Hkv, C + A * masks, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        size = self._size
        groups = query.shape[1] // key.shape[1]
        keys, values = (tensor[:, :, :size].repeat_interleave(groups, 1) for tensor in (key, value))
        sequence_out = functional.scaled_dot_product_attention(query[:, :, :size], keys, values, is_causal=True)
        if query.shape[2] == size:
            return sequence_out
        return torch.cat([sequence_out, self._attend_masks(query, key, value)], 2)

    def _attend_masks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention outputs [B, Hq, A * masks, D] of the masks."""
        size = self._size
        chains = self._hidden.shape[3]
        rows, heads, columns, dim = key.shape
        masks = (columns - size) // chains
        by_chain = (rows, heads, -1, chains, masks)
        flat = (rows, heads, -1, columns - size)
        query = query[:, :, size:].reshape(*flat, dim) * dim**-0.5  # [B, Hkv, G, A * masks, D]
        # Both are [B, Hkv, 1, A, masks, D].
        mask_keys, mask_values = (tensor[:, :, size:].reshape(*by_chain, dim) for tensor in (key, value))
        keys, values = (tensor[:, :, None, :size] for tensor in (key, value))
        sequence_scores = (query @ keys.transpose(-1, -2)).view(*by_chain, size).masked_fill(self._hidden, -torch.inf)
        future = torch.ones(masks, masks, dtype=torch.bool, device=query.device).triu(1)
        mask_scores = (query.view(*by_chain, dim) @ mask_keys.transpose(-1, -2)).masked_fill(future, -torch.inf)
        weights = torch.cat([sequence_scores, mask_scores], -1).float().softmax(-1).to(value.dtype)
        from_sequence = weights[..., :size].reshape(*flat, size) @ values
        from_masks = (weights[..., size:] @ mask_values).view(*flat, dim)
        return (from_sequence + from_masks).flatten(1, 2)
