"""Drafts without keys and values of their own: their layers look at the target's (as Gemma 4's assistants do, 2026).

A column is a token together with the state before it, as for drafts that follow; but nothing is ever read of a text.
All guesses are made from the place of the text's last token, whose query sees what the target has cached: everything
before it. What leads from guess to guess is the state alone, in the target's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from outrider.heads.description import Body, HeadDescription, SharedKV
from outrider.heads.modules.base import HeadBase
from outrider.heads.modules.layers import Gated, Norm, rotate, rotation

# (which decoder layer, its queries [*, heads, T, D]) to what they find [*, heads, T, D]
KVSharingInput = Callable[[int, torch.Tensor], torch.Tensor]


class KVSharingHead(HeadBase):
    """Decoder layers of queries, between a projection from the target's width and one back."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        it, body, join = description, description.body, description.input_fusion
        assert body is not None
        assert join is not None
        self.body, self.join, wide = body, join, it.target_hidden
        if join.norms:
            self.embedding_norm, self.state_norm = Norm(wide, body.epsilon), Norm(wide, body.epsilon)
        self.project = nn.Linear(2 * wide, body.hidden, bias=join.bias)
        self.layers = nn.ModuleList(_Layer(_seen(body, view), i) for i, view in enumerate(it.shared_kv))
        if it.final_norm:
            self.norm = Norm(body.hidden, body.epsilon)
        self.back = nn.Linear(body.hidden, wide, bias=False)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """States [*, H] from what was tapped [*, taps, H], the target's last state alone."""
        return taps[..., -1, :]

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] the target's ids
        states: torch.Tensor,  # [*, T, target H] the target's, or recycled
        positions: torch.Tensor,  # [*, T] of the last tokens of the texts from which guesses are made
        look: KVSharingInput,
    ) -> torch.Tensor:
        """The outputs [*, T, H] after the final norm."""
        embedded, state = self.embed(tokens).to(states.dtype), states
        if self.join.norms:
            embedded, state = self.embedding_norm(embedded), self.state_norm(states)
        x = self.project(torch.cat((embedded, state) if self.join.embedding_first else (state, embedded), -1))
        turns = {view: rotation(positions, _seen(self.body, view), x.dtype) for view in self.description.shared_kv}
        for layer, view in zip(self.layers, self.description.shared_kv, strict=True):
            x = layer(x, turns[view], look)
        return self.norm(x) if self.description.final_norm else x  # type: ignore[no-any-return]

    def recycled(self, out: torch.Tensor) -> torch.Tensor:
        """The state [*, target H] that goes on behind a guess, from an output."""
        return self.back(out)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """Attention of queries, and a perceptron; with norms behind both, and a scale, where they are Gemma's."""

    def __init__(self, body: Body, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Queries(body, layer), Gated(body)
        self.input_layernorm = Norm(body.hidden, body.epsilon)
        self.post_attention_layernorm = Norm(body.hidden, body.epsilon)
        self.gemma = body.gemma
        if body.gemma:
            self.pre_feedforward_layernorm = Norm(body.hidden, body.epsilon)
            self.post_feedforward_layernorm = Norm(body.hidden, body.epsilon)
            self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], look: KVSharingInput) -> torch.Tensor:
        found = self.self_attn(self.input_layernorm(x), rotary, look)
        if not self.gemma:
            x = x + found
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(found)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class _Queries(nn.Module):
    """The half of an attention that asks."""

    def __init__(self, body: Body, layer: int) -> None:
        super().__init__()
        self.layer_idx, self.dim = layer, body.dim
        self.scale = body.dim**0.5 if body.gemma else 1.0  # against the one that attention has anyway
        self.q_proj = nn.Linear(body.hidden, body.heads * body.dim, bias=body.attention_bias)
        self.o_proj = nn.Linear(body.heads * body.dim, body.hidden, bias=body.output_bias)
        if body.head_norms:
            self.q_norm = Norm(body.dim, body.epsilon)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], look: KVSharingInput) -> torch.Tensor:
        query = self.q_proj(x).unflatten(-1, (-1, self.dim)).transpose(-2, -3)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        found = look(self.layer_idx, rotate(query, *rotary) * self.scale)
        return self.o_proj(found.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


def _seen(body: Body, view: SharedKV) -> Body:
    """The body of a layer with this view."""
    sized = replace(body, key_heads=view.key_heads, dim=view.dim)
    return replace(sized, theta=view.theta, rope=view.rope, rotary=view.rotary)
