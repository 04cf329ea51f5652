"""Unrolls a block head: blocks at random positions, filled in by one pass (DFlash, DSpark, XPress and others).

The hidden states of a sequence are projected once, for many blocks side by side. A block attends to the states before
it and to itself, like the one block that the engine drafts at this position. Draft token k of a block is trained after
k given tokens, as the engine uses it after k accepted ones.

The papers weight draft token k by exp(-k / gamma), counted from 0. This is a loss decay of exp(-1 /
gamma): 0.78 for blocks of 7 draft tokens, 0.82 for 9 and 0.87 for 15.

A causal refiner (XPress, 2608.02438) is trained after given tokens, as it is used when tokens are
sampled, and after its own tokens of an earlier Jacobi pass, as greedy drafts use it (consistency).
The logits without the correction are trained as well, because the first pass starts from them.

So are those of a candidate selector (DFlash 2), because they decide which tokens are candidates. The
selector itself is trained on all tokens. And so are those of a recurrent correction (Domino), whose
paper lowers their weight in the course of the training.
"""

from collections.abc import Iterator, Sequence

import torch

from outrider.models.heads.description import BlockView
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.layers import Attention
from outrider.train.loss.steps import Step, TrainingBatch, sample_columns

MAX_BLOCKS = 512  # per sequence
# Weights of the losses of a refiner, besides that after given tokens: after its own tokens, and without correction.
_CONSISTENCY_WEIGHT, _BASE_WEIGHT = 0.3, 0.6
_UNARY_WEIGHT = 1.0  # of the loss without the correction of a selector
CONSISTENCY_PASSES = 3  # each batch trains one of them, at random
_CHUNK_LOGITS = 1 << 24  # computed at once, for own tokens


def unroll_blocks(module: BlockHead, batch: TrainingBatch, steps: int, share: float) -> Iterator[Step]:
    """Yield the draft tokens 0, 1, ... of blocks at a share of the positions. A column is the same block in all steps.

    Args:
        module: the block head.
        batch: the sequences to train on.
        steps: the most steps.
        share: share of the trained positions at which a block begins, in (0, 1].
    """
    starts, valid = anchors(batch.loss_mask, share)
    columns = _forward(module, batch, starts)
    out = module.predicting(columns)
    refiner = _RefinerSteps(module, batch, starts, columns) if module.block.refiner else None
    states: torch.Tensor | None = None  # [B, A, S] of a recurrent correction
    rows = torch.arange(len(starts), device=starts.device)[:, None].expand_as(starts)
    last = batch.loss_mask.shape[1] - 1
    for index in range(min(steps, module.block.draft_tokens)):
        position = (starts + index).clamp(max=last)  # of the token before the draft token
        valid = valid & (starts + index <= last) & batch.loss_mask[rows, position]
        index_out = out[:, :, index][valid]
        before = batch.tokens[rows, position]
        previous_tokens = before[valid]
        target = batch.target_probs_at(rows[valid], position[valid])
        base = module.logits(index_out)
        if refiner is not None:
            yield refiner.step(index, valid, base, target)
            continue
        if module.block.recurrence:
            states = module.recurrence.advance(module.embed(before), states)
            depth = torch.full_like(previous_tokens, index)
            corrections = module.recurrence.corrections(index_out, states[valid], depth)
            yield Step(loss_mask=valid, logits=base + corrections, target=target, auxiliary=((_BASE_WEIGHT, base),))
            continue
        yield Step(
            loss_mask=valid,
            logits=module.correct_logits(base, index_out, previous_tokens),
            target=target,
            confidence=module.confidence(index_out, previous_tokens) if module.block.confidence else None,
            auxiliary=((_UNARY_WEIGHT, base),) if module.block.selector else (),
        )


def anchors(loss_mask: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the positions at which blocks begin, at random.

    Args:
        loss_mask: [B, L] bool: whether to train on the distribution after a token.
        share: share of these positions to choose, in (0, 1].

    Returns:
        The positions [B, A] in ascending order, never the first of a sequence; and whether [B, A]
        they are trained. Sequences with fewer positions have padding at the end.
    """
    allowed = loss_mask.clone()
    allowed[:, 0] = False
    if share < 1:
        allowed &= torch.rand(allowed.shape).to(allowed.device) < share
    return sample_columns(allowed, MAX_BLOCKS)


def _forward(module: BlockHead, batch: TrainingBatch, starts: torch.Tensor) -> torch.Tensor:
    """Return the outputs [B, A, size, H] of blocks that begin at positions `starts` [B, A]."""
    states = module.fuse_states(batch.aux_states)
    device = starts.device
    positions = torch.arange(states.shape[1], device=device)
    block_positions = starts[..., None] + torch.arange(module.block.size, device=device)
    state_kv = module.keys_and_values(states, positions.expand(len(states), -1))
    views = module.block.views or (BlockView(),) * len(state_kv)
    attention = _BlockAttention(state_kv, starts, block_positions, views)
    first_tokens = batch.tokens.gather(1, starts)
    return module(first_tokens, block_positions.flatten(1), attention)  # type: ignore[no-any-return]


class _RefinerSteps:
    """The draft tokens of a block head with a causal refiner."""

    def __init__(self, module: BlockHead, batch: TrainingBatch, starts: torch.Tensor, columns: torch.Tensor) -> None:
        """Take blocks at positions `starts` [B, A] and their outputs [B, A, size, H]."""
        self._module = module
        first = module.block.first_column
        offsets = torch.arange(-first, module.block.size - first, device=starts.device)
        # The token before the token that a column predicts. A block never begins at position 0.
        positions = (starts[..., None] + offsets).clamp(0, batch.tokens.shape[1] - 1)
        given = batch.tokens.gather(1, positions.flatten(1)).view(positions.shape)
        features = module.refiner.features(columns)
        passes = int(torch.randint(CONSISTENCY_PASSES, ()))  # from the CPU generator, whose state is saved
        own = _own_tokens(module, features.detach(), module.predicting(columns).detach(), given, passes)
        self._given = self._latents(features, given)
        self._own = self._latents(features, own)

    def step(self, index: int, valid: torch.Tensor, base: torch.Tensor, target: torch.Tensor) -> Step:
        """Return the step of draft token number `index`.

        Args:
            index: of the draft token.
            valid: [B, A] bool: blocks in which it is trained.
            base: [n, Vd] their logits without the correction.
            target: [n, Vd] the target's probabilities.
        """
        refiner = self._module.refiner
        logits, own_logits = (
            base + refiner.corrections(latents[:, :, index][valid]) for latents in (self._given, self._own)
        )
        auxiliary = ((_CONSISTENCY_WEIGHT, own_logits), (_BASE_WEIGHT, base))
        return Step(loss_mask=valid, logits=logits, target=target, auxiliary=auxiliary)

    def _latents(self, features: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the latents [B, A, draft tokens, rank] of the columns that predict, after tokens [B, A, size]."""
        refiner = self._module.refiner
        return refiner.mix_columns(refiner.inputs(features, before))[:, :, self._module.block.first_column :]


@torch.no_grad()
def _own_tokens(
    module: BlockHead, features: torch.Tensor, out: torch.Tensor, given: torch.Tensor, passes: int
) -> torch.Tensor:
    """Return the tokens [B, A, size] that columns read in Jacobi pass number `passes`, counted from 0.

    Args:
        module: the block head.
        features: [B, A, size, rank] what its refiner computes without tokens.
        out: [B, A, draft tokens, H] outputs of the columns that predict.
        given: [B, A, size] the tokens of the text. Those of the first draft token and before it are kept.
        passes: passes before.
    """
    known = module.block.first_column + 1
    before = given.clone()
    flat_before, flat_features, flat_out = (tensor.flatten(0, 1) for tensor in (before, features, out))
    count = max(_CHUNK_LOGITS // (out.shape[2] * module.description.output_vocab), 1)
    for begin in range(0, len(flat_out), count):
        chunk = slice(begin, begin + count)
        base = module.logits(flat_out[chunk])
        logits = base
        for done in range(passes + 1):
            flat_before[chunk, known:] = module.ids[logits.argmax(-1)][:, :-1]
            if done < passes:
                inputs = module.refiner.inputs(flat_features[chunk], flat_before[chunk])
                latents = module.refiner.mix_columns(inputs)[:, module.block.first_column :]
                logits = base + module.refiner.corrections(latents)
    return before


class _BlockAttention:
    """Attention of a block to the states before it and to itself."""

    def __init__(
        self,
        state_kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        starts: torch.Tensor,
        positions: torch.Tensor,
        views: Sequence[BlockView],
    ) -> None:
        """Take the keys and values of states, and the blocks.

        Args:
            state_kv: keys and values [B, Hkv, L, D] of the target's states, by layer.
            starts: [B, A] positions of the first columns of blocks.
            positions: [B, A, size] positions of all columns.
            views: what the columns see, by layer.
        """
        self._state_kv = state_kv
        self._views = views
        length = state_kv[0][0].shape[2]
        self._hidden = {view: _hidden(view, starts, positions, length)[:, None, None] for view in set(views)}

    def __call__(
        self,
        attention: Attention,
        query: torch.Tensor,  # [B, Hq, A * size, D]
        key: torch.Tensor,  # [B, Hkv, A * size, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        state_keys, state_values = (tensor[:, :, None] for tensor in self._state_kv[attention.layer_idx])
        hidden = self._hidden[self._views[attention.layer_idx]]  # [B, 1, 1, A, size, L + size]
        length = state_keys.shape[3]  # of [B, Hkv, 1, L, D]
        rows, heads, columns, dim = key.shape
        by_block = hidden.shape[3:5]
        query = (query * dim**-0.5).view(rows, heads, -1, columns, dim)
        key, value = (tensor.reshape(rows, heads, 1, *by_block, dim) for tensor in (key, value))
        state_scores = (query @ state_keys.transpose(-1, -2)).view(rows, heads, -1, *by_block, length)
        block_scores = query.view(rows, heads, -1, *by_block, dim) @ key.transpose(-1, -2)
        # block_scores is [B, Hkv, G, A, size, size]
        scores = torch.cat([state_scores, block_scores], -1).masked_fill(hidden, -torch.inf)
        weights = scores.float().softmax(-1).to(value.dtype)
        from_states = weights[..., :length].flatten(3, 4) @ state_values
        from_block = (weights[..., length:] @ value).flatten(3, 4)
        return (from_states + from_block).flatten(1, 2)


def _hidden(view: BlockView, starts: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Return whether a column does not see each of `length` states and each column of its block.

    The result is [B, A, size, length + size] bool. The other arguments are those of `_BlockAttention`.
    """
    states = torch.arange(length, device=starts.device)
    columns = positions[..., None]  # [B, A, size, 1]
    of_states = (states >= starts[..., None, None]).expand(*positions.shape, -1)
    of_block = torch.zeros_like(columns, dtype=torch.bool).expand(*positions.shape, positions.shape[-1])
    if view.causal:
        of_block = columns < positions[..., None, :]
    if view.window:
        of_states = of_states | (states <= columns - view.window)
        of_block = of_block | (positions[..., None, :] <= columns - view.window)
    return torch.cat([of_states, of_block], -1)
