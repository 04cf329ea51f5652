"""Unrolls a draft over a batch: the training-time test of EAGLE-3 (Li et al. 2025, 3.2).

Column c holds token x_(c+1) and the target's hidden state f_c. In step 0 it predicts x_(c+2). In step s it continues
after s draft tokens: their tokens are given, and their hidden states are the draft's own. A query in step s attends to
the columns of step 0 up to its own column, and to its own column in later steps. If the draft has several modules, each
module makes one step, and attends to everything that it has computed itself.

The result equals a draft that predicts one token after another. The tests compare the two.

A draft that attends to the target's keys and values sees those up to column c in all steps. Its
queries have the position of x_(c+1).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.kv_sharing import KVSharingHead
from outrider.models.heads.modules.layers import Attention
from outrider.models.heads.modules.parallel import ParallelHead
from outrider.models.heads.store import HeadModule
from outrider.train.loss.blocks import unroll_blocks
from outrider.train.loss.masks import unroll_masks
from outrider.train.loss.steps import Chains, all_columns_step
from outrider.train.loss.steps import Step as Step
from outrider.train.loss.steps import TrainingBatch as TrainingBatch


def unrolled(module: HeadModule, batch: TrainingBatch, steps: int, later: float = 1.0) -> Iterator[Step]:
    """Yield steps 0, 1, ..., as far as the sequences reach.

    Args:
        module: the draft head.
        batch: the sequences to train on.
        steps: the most steps.
        later: share of the columns that train more than the first draft token, chosen at random. The other columns are
            still attended to. For block heads, the share of the positions at which a block begins.
    """
    if isinstance(module, BlockHead):
        return unroll_blocks(module, batch, steps, later)
    if isinstance(module, ParallelHead):
        return _unroll_parallel(module, batch, steps)
    if isinstance(module, KVSharingHead):
        return _unroll_autoregressive(module, batch, steps, later)
    if module.description.masks:
        return unroll_masks(module, batch, steps, later)
    if module.description.modules > 1:
        return _unroll_modules(module, batch, steps)
    return _unroll_autoregressive(module, batch, steps, later)


def _unroll_autoregressive(
    module: AutoregressiveHead | KVSharingHead, batch: TrainingBatch, steps: int, later: float
) -> Iterator[Step]:
    """Apply one module again and again."""
    states = module.fuse_states(batch.aux_states[:, :-1])
    rows, size = states.shape[:2]
    columns = torch.arange(size, device=states.device).expand(rows, -1)
    shares_kv = isinstance(module, KVSharingHead)
    attention: _SharedKVAttention | _ChainAttention
    if isinstance(module, KVSharingHead):
        attention = _SharedKVAttention(module, batch, columns)
    else:
        attention = _ChainAttention()
    out = module(batch.tokens[:, 1 : 1 + size], states, columns + int(shares_kv), attention)
    loss_mask = batch.loss_mask[:, 1:]
    extra_loss = module.centroid_head.loss if module.description.centroids else None
    yield all_columns_step(batch, 0, out, module.logits, extra_loss)
    if min(steps, size) == 1 or not bool(loss_mask.any()):
        return
    chains = Chains.of(loss_mask, later, size)
    states = module.feed_back(out)[chains.rows, chains.columns]
    attention.select(chains.columns)
    for step in range(1, min(steps, size)):
        tokens = batch.tokens[chains.rows, chains.positions(step)]
        out = module(tokens, states, chains.columns + (1 if shares_kv else step), attention)
        states = module.feed_back(out)
        yield chains.step(batch, step, out, module.logits, extra_loss)


def _unroll_modules(module: AutoregressiveHead, batch: TrainingBatch, steps: int) -> Iterator[Step]:
    """Apply each module once. It reads the states of the module before it, and tokens one position later."""
    states = module.fuse_states(batch.aux_states[:, :-1])
    for step in range(min(steps, module.description.modules, states.shape[1])):
        rows, size = states.shape[:2]
        positions = torch.arange(step, step + size, device=states.device).expand(rows, -1)
        out = module(batch.tokens[:, 1 + step : 1 + step + size], states, positions, _ChainAttention(), step)
        yield all_columns_step(batch, step, out, partial(module.logits, module=step))
        states = module.feed_back(out, step)[:, :-1]


def _unroll_parallel(module: ParallelHead, batch: TrainingBatch, steps: int) -> Iterator[Step]:
    """Apply each of the parallel heads to the target's last hidden state."""
    states = batch.aux_states[:, :, -1]
    size = states.shape[1]
    for head in range(min(steps, module.stack.heads, size - 1)):
        columns = size - 1 - head
        # [B, C, head + 1] the tokens after the state
        tokens = batch.tokens[:, 1:].unfold(1, head + 1, 1)[:, :columns]
        loss_mask = batch.loss_mask[:, 1 + head :]
        row, column = loss_mask.nonzero(as_tuple=True)
        logits = module(states[row, column], tokens[row, column], head)
        yield Step(loss_mask=loss_mask, logits=logits, target=batch.target_probs_at(row, column + 1 + head))


class _SharedKVAttention:
    """Attention of a kv-sharing head to the target's keys and values up to each column."""

    def __init__(self, module: KVSharingHead, batch: TrainingBatch, columns: torch.Tensor) -> None:
        self._views = module.description.shared_kv
        self._shared_kv = batch.shared_kv
        self._columns = columns

    def select(self, columns: torch.Tensor) -> None:
        """Use only the columns [B, A] in later steps."""
        self._columns = columns

    def __call__(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        view = self._views[layer]
        keys, values = (tensor.to(query.dtype) for tensor in self._shared_kv[view.layer])  # [B, Hkv, L, D]
        entries = torch.arange(keys.shape[2], device=query.device)
        last = self._columns[..., None]
        mask = entries <= last
        if view.window:
            mask &= entries > last - view.window
        groups = query.shape[1] // keys.shape[1]
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (keys, values))
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])


class _ChainAttention:
    """Attention of a query to step 0 up to its column, and to its own column in later steps."""

    def __init__(self) -> None:
        self._columns = torch.empty(0)  # [B, A] the columns of later steps
        self._keys: dict[int, list[torch.Tensor]] = {}  # by layer: those of step 0, then of each later step
        self._values: dict[int, list[torch.Tensor]] = {}

    def select(self, columns: torch.Tensor) -> None:
        """Use only the columns [B, A] in later steps."""
        self._columns = columns

    def __call__(
        self,
        attention: Attention,
        query: torch.Tensor,  # [B, Hq, C, D]
        key: torch.Tensor,  # [B, Hkv, C, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        keys = self._keys.setdefault(attention.layer_idx, [])
        values = self._values.setdefault(attention.layer_idx, [])
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        if len(keys) == 1:
            return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        size = keys[0].shape[2]
        query = query * query.shape[-1] ** -0.5
        first_scores = query @ keys[0].transpose(-1, -2)
        hidden = torch.arange(size, device=query.device) > self._columns[:, None, :, None]
        later_scores = [(query * step_keys).sum(-1, keepdim=True) for step_keys in keys[1:]]
        scores = torch.cat([first_scores.masked_fill(hidden, -torch.inf), *later_scores], -1)
        weights = scores.float().softmax(-1).to(query.dtype)
        out = weights[..., :size] @ values[0]
        for i, step_values in enumerate(values[1:]):
            out = out + weights[..., size + i, None] * step_values
        return out
