"""Masks behind tokens drawn at random, in one pass with the texts that they stand behind (P-EAGLE, 2602.01469).

The columns of a text come first, as in any draft that follows states, and see each other as text does. Behind each
column that is drawn stand masks, which see the text up to it and the masks before them: what the engine's masks will
see there. Mask k guesses behind k given tokens, as it will behind kept ones, and has seen none of them.

The paper drops more of the masks the deeper they stand. Here a share of the columns has all of its masks, for the same
work, and each of these weighs as much as all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.modules.layers import Attention
from outrider.train.loss.steps import Chains, Step, Texts, everywhere

_MOST = 512  # columns of a text with masks behind them


def behind_masks(module: AutoregressiveHead, texts: Texts, steps: int, later: float) -> Iterator[Step]:
    """The guesses of columns, and of the masks behind a share `later` of them."""
    assert module.description.masks is not None
    states = module.fused(texts.aux_states[:, :-1])
    rows, size = states.shape[:2]
    masks = max(min(steps, module.description.masks.draft_tokens, size) - 1, 0)
    chains = Chains.of(texts.learn[:, 1:], later, _MOST)
    device, count = states.device, chains.columns.shape[1]
    tokens = texts.tokens.new_full((rows, count * masks), module.description.masks.token)
    depths = torch.arange(1, 1 + masks, device=device)
    every = torch.arange(size, device=device).expand(rows, -1)
    out = module(
        torch.cat([texts.tokens[:, 1 : 1 + size], tokens], 1),
        torch.cat([states, module.masked().to(states.dtype).expand(rows, count * masks, -1)], 1),
        torch.cat([every, (chains.columns[..., None] + depths).flatten(1)], 1),
        _Look(size, chains.columns),
    )
    yield everywhere(texts, 0, out, module.logits)
    behind = out[:, size:].reshape(rows, count, masks, out.shape[-1])
    for guess in range(1, 1 + masks):
        yield chains.step(texts, guess, behind[:, :, guess - 1], module.logits)


class _Look:
    """Who sees whom."""

    def __init__(self, size: int, columns: torch.Tensor) -> None:
        """Take `size` columns of each text, and behind which of them [B, A] masks stand."""
        self._size = size
        self._unseen = (torch.arange(size, device=columns.device) > columns[..., None])[:, None, None, :, None]

    def __call__(
        self,
        of: Attention,
        query: torch.Tensor,  # [B, Hq, C + A * masks, D]
        key: torch.Tensor,  # [B, Hkv, C + A * masks, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        size, sharing = self._size, query.shape[1] // key.shape[1]
        keys, values = (each[:, :, :size].repeat_interleave(sharing, 1) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query[:, :, :size], keys, values, is_causal=True)
        if query.shape[2] == size:
            return seen
        return torch.cat([seen, self._masks(query, key, value)], 2)

    def _masks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        size, chains = self._size, self._unseen.shape[3]
        (rows, heads, columns, dim), masks = key.shape, (key.shape[2] - size) // chains
        apart, together = (rows, heads, -1, chains, masks), (rows, heads, -1, columns - size)
        query = query[:, :, size:].reshape(*together, dim) * dim**-0.5  # [B, Hkv, G, A * masks, D]
        own, shown = (each[:, :, size:].reshape(*apart, dim) for each in (key, value))  # [B, Hkv, 1, A, masks, D]
        keys, values = (each[:, :, None, :size] for each in (key, value))
        before = (query @ keys.transpose(-1, -2)).view(*apart, size).masked_fill(self._unseen, -torch.inf)
        after = torch.ones(masks, masks, dtype=torch.bool, device=query.device).triu(1)
        beside = (query.view(*apart, dim) @ own.transpose(-1, -2)).masked_fill(after, -torch.inf)
        weights = torch.cat([before, beside], -1).float().softmax(-1).to(value.dtype)
        far, near = weights[..., :size].reshape(*together, size), weights[..., size:]
        return (far @ values + (near @ shown).view(*together, dim)).flatten(1, 2)
