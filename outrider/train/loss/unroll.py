"""The training-time test: a draft goes on from its own states, as it will have to (EAGLE-3, Li et al. 2025, 3.2).

Column c holds the token x_(c+1) and the target's state f_c. At step 0 it guesses x_(c+2); at step s it has gone on s
guesses, of which the tokens are given and the states are its own. A guess sees the columns of step 0 up to the one that
it began from, and of later steps its own ancestors alone. Of several modules each makes one step, and sees all that it
has read itself. The sequential truth of this is the draft at work, one guess after another, and the tests compare the
two.

A draft that looks at the target's keys and values sees those up to column c at all steps, from the place of x_(c+1).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.modules.block import BlockHead
from outrider.heads.modules.kv_sharing import KVSharingHead
from outrider.heads.modules.layers import Attention
from outrider.heads.modules.parallel import ParallelHead
from outrider.heads.store import HeadModule
from outrider.train.loss.blocks import in_blocks
from outrider.train.loss.masks import behind_masks
from outrider.train.loss.steps import Chains, everywhere
from outrider.train.loss.steps import Step as Step
from outrider.train.loss.steps import Texts as Texts


def unrolled(module: HeadModule, texts: Texts, steps: int, later: float = 1.0) -> Iterator[Step]:
    """The guesses of steps 0, 1, ..., as far as texts reach.

    Behind the first, drafts that follow states go on from a share `later` of the columns alone, drawn at random; all of
    them are there to be seen. Blocks begin behind such a share.
    """
    if isinstance(module, BlockHead):
        return in_blocks(module, texts, steps, later)
    if isinstance(module, ParallelHead):
        return _independent(module, texts, steps)
    if isinstance(module, KVSharingHead):
        return _followed(module, texts, steps, later)
    if module.description.masks:
        return behind_masks(module, texts, steps, later)
    if module.description.modules > 1:
        return _by_modules(module, texts, steps)
    return _followed(module, texts, steps, later)


def _followed(module: AutoregressiveHead | KVSharingHead, texts: Texts, steps: int, later: float) -> Iterator[Step]:
    states = module.fused(texts.aux_states[:, :-1])
    rows, size = states.shape[:2]
    every, looks = torch.arange(size, device=states.device).expand(rows, -1), isinstance(module, KVSharingHead)
    look: _Glance | _Look = _Glance(module, texts, every) if isinstance(module, KVSharingHead) else _Look()
    out = module(texts.tokens[:, 1 : 1 + size], states, every + int(looks), look)
    learn = texts.learn[:, 1:]
    yield everywhere(texts, 0, out, module.logits)
    if min(steps, size) == 1 or not bool(learn.any()):
        return
    chains = Chains.of(learn, later, size)
    states = module.recycled(out)[chains.rows, chains.columns]
    look.narrow(chains.columns)
    for step in range(1, min(steps, size)):
        tokens = texts.tokens[chains.rows, chains.places(step)]
        out = module(tokens, states, chains.columns + (1 if looks else step), look)
        states = module.recycled(out)
        yield chains.step(texts, step, out, module.logits)


def _by_modules(module: AutoregressiveHead, texts: Texts, steps: int) -> Iterator[Step]:
    """Each module reads the texts once, one token further behind than the one before, and from its states."""
    states = module.fused(texts.aux_states[:, :-1])
    for step in range(min(steps, module.description.modules, states.shape[1])):
        rows, size = states.shape[:2]
        places = torch.arange(step, step + size, device=states.device).expand(rows, -1)
        out = module(texts.tokens[:, 1 + step : 1 + step + size], states, places, _Look(), step)
        yield everywhere(texts, step, out, partial(module.logits, module=step))
        states = module.recycled(out, step)[:, :-1]


def _independent(module: ParallelHead, texts: Texts, steps: int) -> Iterator[Step]:
    states = texts.aux_states[:, :, -1]
    size = states.shape[1]
    for head in range(min(steps, module.stack.heads, size - 1)):
        here = size - 1 - head
        tokens = texts.tokens[:, 1:].unfold(1, head + 1, 1)[:, :here]  # [B, C, head + 1] what came after the state
        learn = texts.learn[:, 1 + head :]
        row, column = learn.nonzero(as_tuple=True)
        logits = module(states[row, column], tokens[row, column], head)
        yield Step(learn=learn, logits=logits, target=texts.target_probs_at(row, column + 1 + head))


class _Glance:
    """The keys and values that a kv-sharing head sees: the target's entries before each position."""

    def __init__(self, module: KVSharingHead, texts: Texts, columns: torch.Tensor) -> None:
        self._views, self._shown, self._columns = module.description.shared_kv, texts.shown, columns

    def narrow(self, columns: torch.Tensor) -> None:
        """From now on, some columns [B, A] go on alone."""
        self._columns = columns

    def __call__(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        view = self._views[layer]
        keys, values = (each.to(query.dtype) for each in self._shown[view.layer])  # [B, Hkv, L, D]
        entries, last = torch.arange(keys.shape[2], device=query.device), self._columns[..., None]
        seen = entries <= last
        if view.window:
            seen &= entries > last - view.window
        sharing = query.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(sharing, 1) for each in (keys, values))
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None])


class _Look:
    """Who sees whom, step after step."""

    def __init__(self) -> None:
        self._columns = torch.empty(0)  # [B, A] from which guesses went on
        self._keys: dict[int, list[torch.Tensor]] = {}  # by layer: step 0's, then one for each later step
        self._values: dict[int, list[torch.Tensor]] = {}

    def narrow(self, columns: torch.Tensor) -> None:
        """From now on, some columns [B, A] go on alone."""
        self._columns = columns

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
        if len(keys) == 1:
            return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        size = keys[0].shape[2]
        query = query * query.shape[-1] ** -0.5
        before = query @ keys[0].transpose(-1, -2)
        unseen = torch.arange(size, device=query.device) > self._columns[:, None, :, None]
        own = [(query * each).sum(-1, keepdim=True) for each in keys[1:]]
        weights = torch.cat([before.masked_fill(unseen, -torch.inf), *own], -1).float().softmax(-1).to(query.dtype)
        out = weights[..., :size] @ values[0]
        for i, each in enumerate(values[1:]):
            out = out + weights[..., size + i, None] * each
        return out
