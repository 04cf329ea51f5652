"""The training-time test: a draft goes on from its own states, as it will have to (EAGLE-3, Li et al. 2025, 3.2).

Column c holds the token x_(c+1) and the target's state f_c. At step 0 it guesses x_(c+2); at step s it has gone on s
guesses, of which the tokens are given and the states are its own. A guess sees the columns of step 0 up to the one that
it began from, and of later steps its own ancestors alone. The sequential truth of this is the draft at work, one guess
after another, and the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from outrider.heads.block import BlockDraft
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent
from outrider.heads.layers import Attention
from outrider.heads.store import HeadModule
from outrider.train.blocks import in_blocks
from outrider.train.steps import Step as Step
from outrider.train.steps import Texts as Texts


def unrolled(module: HeadModule, texts: Texts, steps: int) -> Iterator[Step]:
    """The guesses of steps 0, 1, ..., as far as texts reach."""
    if isinstance(module, BlockDraft):
        return in_blocks(module, texts, steps)
    run = _followed if isinstance(module, Follower) else _independent
    return run(module, texts, steps)  # type: ignore[arg-type]


def _followed(module: Follower, texts: Texts, steps: int) -> Iterator[Step]:
    states = module.fused(texts.taps[:, :-1])
    look = _Look()
    size = states.shape[1]
    for step in range(min(steps, size)):
        here = size - step  # columns whose guess still lies within the text
        tokens = texts.tokens[:, 1 + step : 1 + size]
        positions = torch.arange(step, size, device=tokens.device).expand(len(tokens), -1)
        states = states[:, :here]
        look.begin(here)
        out = module(tokens, states, positions, look)
        states = module.recycled(out)
        yield Step(
            logits=module.logits(out),
            target=texts.laws[:, 1 + step :],
            learn=texts.learn[:, 1 + step :],
        )


def _independent(module: Independent, texts: Texts, steps: int) -> Iterator[Step]:
    states = texts.taps[:, :, -1]
    size = states.shape[1]
    for head in range(min(steps, module.stack.heads, size - 1)):
        here = size - 1 - head
        tokens = texts.tokens[:, 1:].unfold(1, head + 1, 1)[:, :here]  # [B, C, head + 1] what came after the state
        yield Step(
            logits=module(states[:, :here], tokens, head),
            target=texts.laws[:, 1 + head :],
            learn=texts.learn[:, 1 + head :],
        )


class _Look:
    """Who sees whom, step after step."""

    def __init__(self) -> None:
        self._step, self._size = -1, 0
        self._keys: dict[int, list[torch.Tensor]] = {}  # by layer: step 0's, then one for each later step
        self._values: dict[int, list[torch.Tensor]] = {}

    def begin(self, columns: int) -> None:
        """The next step, of so many columns."""
        self._step, self._size = self._step + 1, columns

    def __call__(
        self,
        of: Attention,
        query: torch.Tensor,  # [B, Hq, C, D]
        key: torch.Tensor,  # [B, Hkv, C, D]
        value: torch.Tensor,
    ) -> torch.Tensor:
        sharing = query.shape[1] // key.shape[1]
        keys, values = (store.setdefault(of.layer_idx, []) for store in (self._keys, self._values))
        keys.append(key.repeat_interleave(sharing, 1))
        values.append(value.repeat_interleave(sharing, 1))
        if not self._step:
            return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        size = self._size
        query = query * query.shape[-1] ** -0.5
        before = query @ keys[0][:, :, :size].transpose(-1, -2)
        later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
        own = [(query * each[:, :, :size]).sum(-1, keepdim=True) for each in keys[1:]]
        weights = torch.cat([before.masked_fill(later, -torch.inf), *own], -1).float().softmax(-1).to(query.dtype)
        out = weights[..., :size] @ values[0][:, :, :size]
        for i, each in enumerate(values[1:]):
            out = out + weights[..., size + i, None] * each[:, :, :size]
        return out
