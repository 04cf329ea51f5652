"""Drafts that follow the target's states token by token: EAGLE-1, 2, 3 and 3.1, and modules for multi-token prediction.

Column j is the text's token x_j together with the state f_(j-1) from which the target (or, behind a guess, the draft
itself) guessed it; its output says what x_(j+1) is. Li et al. 2024 (EAGLE), 2025 (EAGLE-3), DeepSeek-AI 2024 (MTP).

A draft may have several modules, each of which makes one guess: module m reads x_j beside what module m - 1 made of
x_(j-1), as the first one reads it beside f_(j-1). So each follows the text one token further behind, in layers of its
own. One module alone is applied again and again instead.

Where guesses are made at once, masks stand behind the text instead (P-EAGLE, 2602.01469). A mask is a column like any
other, with the embedding of a token that texts do not hold and, for what the target would have shown, numbers that are
learned and that all masks share.
"""

from __future__ import annotations

import torch
from torch import nn

from outrider.heads.description import Feedback, FuseNorm, FusionPoint, HeadDescription
from outrider.heads.modules.base import HeadBase
from outrider.heads.modules.layers import AttentionInput, Layer, Norm, rotation


class Stage(nn.Module):
    """One module: what joins embeddings and states, decoder layers, and the norm behind them."""

    def furnish(self, it: HeadDescription, number: int) -> None:
        """Make the parts of module `number`."""
        body, join = it.body, it.input_fusion
        assert body is not None
        assert join is not None
        self.body, self.join = body, join
        width, first = body.hidden, number * body.layers
        if join.norms:
            self.embedding_norm, self.state_norm = Norm(width, body.epsilon), Norm(width, body.epsilon)
        if join.at is FusionPoint.PROJECTION:
            self.project = nn.Linear(2 * width, width, bias=join.bias)
        wide = join.at is FusionPoint.ATTENTION
        self.layers = nn.ModuleList(
            Layer(body, first + i, inputs=width, norm=body.first_norm or i > 0)
            if i or not wide
            else Layer(body, first, inputs=2 * width, norm=False)
            for i in range(body.layers)
        )
        if it.final_norm:
            self.norm = Norm(width, body.epsilon)

    def read(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, look: AttentionInput
    ) -> torch.Tensor:
        """The outputs [*, T, H] of embeddings and states [*, T, H] at positions [*, T]."""
        if self.join.zero_first:
            embedded = embedded * (positions > 0)[..., None]
        state = states
        if self.join.norms:
            embedded, state = self.embedding_norm(embedded), self.state_norm(states)
        pair = (embedded, state) if self.join.embedding_first else (state, embedded)
        both = torch.cat(pair, -1)
        rotary = rotation(positions, self.body, states.dtype)
        if self.join.at is FusionPoint.PROJECTION:
            x, ready = self.project(both), None
        else:
            x, ready = state if self.join.residual_normed else states, both
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, look, ready=None if i else ready)
        return x  # type: ignore[no-any-return]

    def normed(self, out: torch.Tensor) -> torch.Tensor:
        """Its outputs [.., H] as the output layer reads them."""
        return self.norm(out) if hasattr(self, "norm") else out


class Deeper(Stage):
    """One behind the first."""

    def __init__(self, it: HeadDescription, number: int) -> None:
        super().__init__()
        self.furnish(it, number)


class AutoregressiveHead(HeadBase, Stage):
    """One decoder layer, mostly, over embeddings and states; it is its own first module."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        it, body, taps = description, description.body, description.aux_states
        assert body is not None
        sources = len(taps.layers) * it.target_hidden
        if taps.norm is FuseNorm.EACH:
            self.fuse_norm = nn.ModuleList(Norm(it.target_hidden, body.epsilon) for _ in taps.layers)
        elif taps.norm is FuseNorm.WHOLE:
            self.fuse_norm = nn.ModuleList([Norm(sources, body.epsilon)])
        if taps.fused:
            self.fuse = nn.Linear(sources, body.hidden, bias=taps.bias)
        if it.masks:
            self.mask = nn.Parameter(torch.empty(sources).normal_())  # in place of what is tapped
        self.furnish(it, 0)
        self.deeper = nn.ModuleList(Deeper(it, number) for number in range(1, it.modules))

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """States [*, H] from what was tapped [*, taps, target H]."""
        gathered = self.gathered(taps)
        return self.fuse(gathered) if self.description.aux_states.fused else gathered

    def gathered(self, taps: torch.Tensor) -> torch.Tensor:
        """The same, normed and side by side [*, taps x target H], as the fusion reads it."""
        if self.description.aux_states.norm is FuseNorm.EACH:
            taps = torch.stack([norm(taps[..., i, :]) for i, norm in enumerate(self.fuse_norm)], -2)
        taps = taps.flatten(-2)
        return self.fuse_norm[0](taps) if self.description.aux_states.norm is FuseNorm.WHOLE else taps

    def masked(self) -> torch.Tensor:
        """The state [H] that masks have."""
        return self.fused(self.mask.view(-1, self.description.target_hidden))

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] the target's ids
        states: torch.Tensor,  # [*, T, H] fused, or recycled
        positions: torch.Tensor,  # [*, T] of the states: a text's second token has position 0
        look: AttentionInput,
        module: int = 0,
    ) -> torch.Tensor:
        """The outputs [*, T, H] of one module, before the final norm."""
        return self._of(module).read(self.embed(tokens).to(states.dtype), states, positions, look)

    def recycled(self, out: torch.Tensor, module: int = 0) -> torch.Tensor:
        """The state that goes on behind a guess, from an output."""
        return self._of(module).normed(out) if self.description.feedback is Feedback.NORMED else out

    def logits(self, out: torch.Tensor, module: int = 0) -> torch.Tensor:
        """[*, Vd] float32, over `ids`, of outputs [*, H] before the final norm."""
        return super().logits(self._of(module).normed(out))

    def _of(self, module: int) -> Stage:
        return self.deeper[module - 1] if module else self  # type: ignore[return-value]
