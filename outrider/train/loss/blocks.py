"""Blocks behind tokens drawn at random, filled in by one masked pass (DFlash, 2602.06036; DSpark, 2607.05147).

A text's states are read once, and many blocks stand beside each other. Each sees what the engine's one block at that
place would see: the states before it, and itself both ways. Guess k of a block stands behind k given tokens, as it will
stand behind kept ones. Papers weigh it by exp(-k / gamma), counted from 0, and so by a decay of exp(-1 / gamma) from
guess to guess: 0.78 for blocks of 7 guesses, 0.82 for 9 and 0.87 for 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.heads.modules.block import BlockHead
from outrider.heads.modules.layers import Attention
from outrider.train.loss.steps import Step, Texts, drawn

_MOST = 512  # blocks of a text


def in_blocks(module: BlockHead, texts: Texts, steps: int, share: float) -> Iterator[Step]:
    """The guesses 0, 1, ... of blocks behind a share of each text's places; column c is the same block in all steps."""
    places, live = anchors(texts.learn, share)
    out = _pass(module, texts, places)
    rows = torch.arange(len(places), device=places.device)[:, None]
    row = rows.expand_as(places)
    last = texts.learn.shape[1] - 1
    for guess in range(min(steps, module.block.draft_tokens)):
        at = (places + guess).clamp(max=last)  # the token before the guess
        live = live & (places + guess <= last) & texts.learn[rows, at]
        ours, before = out[:, :, guess], texts.tokens[rows, at]
        ours, before = ours[live], before[live]
        yield Step(
            learn=live,
            logits=module.corrected(module.logits(ours), before),
            target=texts.target_probs_at(row[live], at[live]),
            confidence=module.confidence(ours, before) if module.block.confidence else None,
        )


def anchors(learn: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where blocks begin.

    Args:
        learn: [B, L] whether the law after a token is learned from.
        share: of such places, in (0, 1].

    Returns:
        Places [B, A] whose laws are, with a token before them, drawn at random and in rising order; and whether they
        are [B, A] such: texts with fewer than others have padding behind.
    """
    able = learn.clone()
    able[:, 0] = False
    if share < 1:
        able &= torch.rand(able.shape).to(able.device) < share
    return drawn(able, _MOST)


def _pass(module: BlockHead, texts: Texts, places: torch.Tensor) -> torch.Tensor:
    """Outputs [B, A, guesses, H] of blocks that begin at `places` [B, A]."""
    states, device = module.fused(texts.aux_states), places.device
    positions = torch.arange(states.shape[1], device=device)
    columns = places[..., None] + torch.arange(module.block.size, device=device)
    look = _Look(module.shown(states, positions.expand(len(states), -1)), positions >= places[..., None])
    return module(texts.tokens.gather(1, places), columns.flatten(1), look)  # type: ignore[no-any-return]


class _Look:
    """Who sees whom."""

    def __init__(self, shown: Sequence[tuple[torch.Tensor, torch.Tensor]], unseen: torch.Tensor) -> None:
        """Take keys and values [B, Hkv, L, D] of states by layer, and which [B, A, L] of them a block does not see."""
        self._shown, self._unseen = shown, unseen[:, None, None, :, None]

    def __call__(
        self,
        of: Attention,
        query: torch.Tensor,  # [B, Hq, A * size, D]
        key: torch.Tensor,  # [B, Hkv, A * size, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = (each[:, :, None] for each in self._shown[of.layer_idx])  # [B, Hkv, 1, L, D]
        (rows, heads, columns, dim), blocks = key.shape, self._unseen.shape[3]
        query = (query * dim**-0.5).view(rows, heads, -1, columns, dim)
        apart = (blocks, columns // blocks)
        key, value = (each.reshape(rows, heads, 1, *apart, dim) for each in (key, value))
        before = (query @ keys.transpose(-1, -2)).view(rows, heads, -1, *apart, keys.shape[3])
        own = query.view(rows, heads, -1, *apart, dim) @ key.transpose(-1, -2)  # [B, Hkv, G, A, size, size]
        weights = torch.cat([before.masked_fill(self._unseen, -torch.inf), own], -1).float().softmax(-1).to(value.dtype)
        far, near = weights[..., : keys.shape[3]], weights[..., keys.shape[3] :]
        return (far.flatten(3, 4) @ values + (near @ value).flatten(3, 4)).flatten(1, 2)
