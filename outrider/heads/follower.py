"""Drafts that follow the target's states token by token: EAGLE-1, 2, 3 and 3.1, and modules for multi-token prediction.

Column j is the text's token x_j together with the state f_(j-1) from which the target (or, behind a guess, the draft
itself) guessed it; its output says what x_(j+1) is. Li et al. 2024 (EAGLE), 2025 (EAGLE-3), DeepSeek-AI 2024 (MTP).
"""

from __future__ import annotations

import torch
from torch import nn

from outrider.heads.description import Description, FuseNorm, JoinAt, Recycle
from outrider.heads.layers import Layer, Look, Norm, rotation


class Follower(nn.Module):
    """One decoder layer, mostly, over embeddings and states.

    The tables that it shares with the target are lent to it (`lend`) and are no parameters of its own.
    """

    ids: torch.Tensor  # [Vd] the target's ids of what is guessed

    def __init__(self, description: Description) -> None:
        super().__init__()
        it, body, join = description, description.body, description.join
        assert body is not None
        assert join is not None
        self.description, self.body, self.join = it, body, join
        width, taps = body.hidden, it.taps
        sources = len(taps.layers) * it.target_hidden
        if taps.norm is FuseNorm.EACH:
            self.fuse_norm = nn.ModuleList(Norm(it.target_hidden, body.epsilon) for _ in taps.layers)
        elif taps.norm is FuseNorm.WHOLE:
            self.fuse_norm = nn.ModuleList([Norm(sources, body.epsilon)])
        if taps.fused:
            self.fuse = nn.Linear(sources, width, bias=taps.bias)
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
        if it.own_head:
            self.head = nn.Linear(width, it.guessed, bias=False)
        if it.own_embedding:
            self.embedding = nn.Embedding(it.vocab, width)
        self.register_buffer("ids", torch.arange(it.guessed), persistent=bool(it.draft_vocab))
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None  # the target's embeddings and output layer

    def lend(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Take the target's tables [V, H] for those that it has not itself."""
        self._lent = embedding, head

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """States [*, H] from what was tapped [*, taps, target H]."""
        if self.description.taps.norm is FuseNorm.EACH:
            taps = torch.stack([norm(taps[..., i, :]) for i, norm in enumerate(self.fuse_norm)], -2)
        taps = taps.flatten(-2)
        if self.description.taps.norm is FuseNorm.WHOLE:
            taps = self.fuse_norm[0](taps)
        return self.fuse(taps) if self.description.taps.fused else taps

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] the target's ids
        states: torch.Tensor,  # [*, T, H] fused, or recycled
        positions: torch.Tensor,  # [*, T] of the states: a text's second token has position 0
        look: Look,
    ) -> torch.Tensor:
        """The outputs [*, T, H] before the final norm."""
        embedded = self._embed(tokens).to(states.dtype)
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
        """[*, Vd] float32, over `ids`."""
        normed = self._normed(out)
        if self.description.own_head:
            return self.head(normed).float()  # type: ignore[no-any-return]
        assert self._lent is not None, "no output layer was lent"
        return nn.functional.linear(normed, self._lent[1].to(normed.dtype)).float()

    def _normed(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out) if self.description.final_norm else out

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.description.own_embedding:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        assert self._lent is not None, "no embeddings were lent"
        return nn.functional.embedding(tokens, self._lent[0])
