"""Draft heads whose layers attend to the target's keys and values instead of their own, as in Gemma 4's assistants.

The input of a column is a token and the hidden state before it, as in other autoregressive heads,
but the head has no KV cache and no prefill. All draft tokens are predicted at the position of the
last committed token, whose query attends to everything in the target's cache before it. Only the
hidden state, in the target's width, is passed from one draft token to the next.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from outrider.models.heads.description import Body, HeadDescription, SharedKV
from outrider.models.heads.modules.base import HeadBase
from outrider.models.heads.modules.layers import GatedMLP, Norm, rotation
from outrider.models.torch.rotary import rotate

# Called with the index of a decoder layer and its queries [*, heads, T, D]. Returns the attention output of that shape.
KVSharingAttention = Callable[[int, torch.Tensor], torch.Tensor]


class KVSharingHead(HeadBase):
    """Decoder layers without keys and values, with projections from the target's width and back to it."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        body = description.body
        fusion = description.input_fusion
        assert body is not None
        assert fusion is not None
        self.body = body
        self.fusion = fusion
        target_hidden = description.target_hidden
        if fusion.norms:
            self.embedding_norm = Norm(target_hidden, body.epsilon)
            self.state_norm = Norm(target_hidden, body.epsilon)
        self.project = nn.Linear(2 * target_hidden, body.hidden, bias=fusion.bias)
        self.layers = nn.ModuleList(
            _Layer(_layer_body(body, shared), i) for i, shared in enumerate(description.shared_kv)
        )
        if description.final_norm:
            self.norm = Norm(body.hidden, body.epsilon)
        self.back = nn.Linear(body.hidden, target_hidden, bias=False)

    def fuse_states(self, aux_states: torch.Tensor) -> torch.Tensor:
        """Return the target's last hidden state [*, H] of its hidden states [*, layers, H]."""
        return aux_states[..., -1, :]

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] target ids
        states: torch.Tensor,  # [*, T, target H] the target's states, or the head's own from `feed_back`
        positions: torch.Tensor,  # [*, T] positions of the last committed tokens
        attend: KVSharingAttention,
    ) -> torch.Tensor:
        """Return the outputs [*, T, H] after the final norm."""
        embedded = self.embed(tokens).to(states.dtype)
        if self.fusion.norms:
            embedded = self.embedding_norm(embedded)
            states = self.state_norm(states)
        pair = (embedded, states) if self.fusion.embedding_first else (states, embedded)
        x = self.project(torch.cat(pair, -1))
        shared_kv = self.description.shared_kv
        rotary = {shared: rotation(positions, _layer_body(self.body, shared), x.dtype) for shared in shared_kv}
        for layer, shared in zip(self.layers, shared_kv, strict=True):
            x = layer(x, rotary[shared], attend)
        return self.norm(x) if self.description.final_norm else x  # type: ignore[no-any-return]

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Return the state [*, target H] that is fed back with the next draft token, for outputs [*, H]."""
        return self.back(out)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """Attention with queries only, and an MLP. Gemma layers also have norms after both, and a scale."""

    def __init__(self, body: Body, layer: int) -> None:
        super().__init__()
        self.self_attn = _QueryAttention(body, layer)
        self.mlp = GatedMLP(body)
        self.input_layernorm = Norm(body.hidden, body.epsilon)
        self.post_attention_layernorm = Norm(body.hidden, body.epsilon)
        self.gemma = body.gemma
        if body.gemma:
            self.pre_feedforward_layernorm = Norm(body.hidden, body.epsilon)
            self.post_feedforward_layernorm = Norm(body.hidden, body.epsilon)
            self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: KVSharingAttention
    ) -> torch.Tensor:
        attention_out = self.self_attn(self.input_layernorm(x), rotary, attend)
        if not self.gemma:
            x = x + attention_out
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(attention_out)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class _QueryAttention(nn.Module):
    """Attention with query and output projections only."""

    def __init__(self, body: Body, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self.dim = body.dim
        self.scale = body.dim**0.5 if body.gemma else 1.0  # cancels the scale of scaled_dot_product_attention
        self.q_proj = nn.Linear(body.hidden, body.heads * body.dim, bias=body.attention_bias)
        self.o_proj = nn.Linear(body.heads * body.dim, body.hidden, bias=body.output_bias)
        if body.head_norms:
            self.q_norm = Norm(body.dim, body.epsilon)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: KVSharingAttention
    ) -> torch.Tensor:
        query = self.q_proj(x).unflatten(-1, (-1, self.dim)).transpose(-2, -3)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        out = attend(self.layer_idx, rotate(query, *rotary) * self.scale)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


def _layer_body(body: Body, shared: SharedKV) -> Body:
    """Return the body of a layer that attends to these keys and values."""
    return replace(
        body, key_heads=shared.key_heads, dim=shared.dim, theta=shared.theta, rope=shared.rope, rotary=shared.rotary
    )
