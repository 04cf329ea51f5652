"""Drafts that follow the target's states token by token: EAGLE-1, 2, 3 and 3.1, and modules for multi-token prediction.

Column j is the text's token x_j together with the state f_(j-1) from which the target (or, behind a guess, the draft
itself) guessed it; its output says what x_(j+1) is. Li et al. 2024 (EAGLE), 2025 (EAGLE-3), DeepSeek-AI 2024 (MTP).

Where guesses are made at once, masks stand behind the text instead (P-EAGLE, 2602.01469). A mask is a column like any
other, with the embedding of a token that texts do not hold and, for what the target would have shown, numbers that are
learned and that all masks share.
"""

from __future__ import annotations

import torch
from torch import nn

from outrider.heads.borrower import Borrower
from outrider.heads.description import Description, FuseNorm, JoinAt, Recycle
from outrider.heads.layers import Layer, Look, Norm, rotation


class Follower(Borrower):
    """One decoder layer, mostly, over embeddings and states."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        it, body, join = description, description.body, description.join
        assert body is not None
        assert join is not None
        self.body, self.join = body, join
        width, taps = body.hidden, it.taps
        sources = len(taps.layers) * it.target_hidden
        if taps.norm is FuseNorm.EACH:
            self.fuse_norm = nn.ModuleList(Norm(it.target_hidden, body.epsilon) for _ in taps.layers)
        elif taps.norm is FuseNorm.WHOLE:
            self.fuse_norm = nn.ModuleList([Norm(sources, body.epsilon)])
        if taps.fused:
            self.fuse = nn.Linear(sources, width, bias=taps.bias)
        if it.masks:
            self.mask = nn.Parameter(torch.empty(sources).normal_())  # in place of what is tapped
        if join.norms:
            self.embedding_norm, self.state_norm = Norm(width, body.epsilon), Norm(width, body.epsilon)
        if join.at is JoinAt.PROJECTION:
            self.project = nn.Linear(2 * width, width, bias=join.bias)
        wide = join.at is JoinAt.ATTENTION
        self.layers = nn.ModuleList(
            Layer(body, i, inputs=width, norm=body.first_norm or i > 0)
            if i or not wide
            else Layer(body, 0, inputs=2 * width, norm=False)
            for i in range(body.layers)
        )
        if it.final_norm:
            self.norm = Norm(width, body.epsilon)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """States [*, H] from what was tapped [*, taps, target H]."""
        if self.description.taps.norm is FuseNorm.EACH:
            taps = torch.stack([norm(taps[..., i, :]) for i, norm in enumerate(self.fuse_norm)], -2)
        taps = taps.flatten(-2)
        if self.description.taps.norm is FuseNorm.WHOLE:
            taps = self.fuse_norm[0](taps)
        return self.fuse(taps) if self.description.taps.fused else taps

    def masked(self) -> torch.Tensor:
        """The state [H] that masks have."""
        return self.fused(self.mask.view(-1, self.description.target_hidden))

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] the target's ids
        states: torch.Tensor,  # [*, T, H] fused, or recycled
        positions: torch.Tensor,  # [*, T] of the states: a text's second token has position 0
        look: Look,
    ) -> torch.Tensor:
        """The outputs [*, T, H] before the final norm."""
        embedded = self.embed(tokens).to(states.dtype)
        if self.join.zero_first:
            embedded = embedded * (positions > 0)[..., None]
        state = states
        if self.join.norms:
            embedded, state = self.embedding_norm(embedded), self.state_norm(states)
        pair = (embedded, state) if self.join.embedding_first else (state, embedded)
        both = torch.cat(pair, -1)
        rotary = rotation(positions, self.body, states.dtype)
        if self.join.at is JoinAt.PROJECTION:
            x, ready = self.project(both), None
        else:
            x, ready = state if self.join.residual_normed else states, both
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, look, ready=None if i else ready)
        return x  # type: ignore[no-any-return]

    def recycled(self, out: torch.Tensor) -> torch.Tensor:
        """The state that goes on behind a guess, from an output."""
        return self._normed(out) if self.description.recycle is Recycle.NORMED else out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[*, Vd] float32, over `ids`, of outputs [*, H] before the final norm."""
        return super().logits(self._normed(out))

    def _normed(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out) if self.description.final_norm else out
