"""Decoder layers of trained drafts, as Llama has them; who sees whom is the caller's business."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from outrider.heads.description import Body

# (the attention, query, key, value), each [*, heads, T, D], to [*, query heads, T, D]
Look = Callable[["Attention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    """x / rms(x) * weight, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Rotary attention with fewer key heads than query heads."""

    def __init__(self, body: Body, inputs: int, layer: int) -> None:
        super().__init__()
        self.layer_idx, self.dim = layer, body.dim
        self.q_proj = nn.Linear(inputs, body.heads * body.dim, bias=body.attention_bias)
        self.k_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.v_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.o_proj = nn.Linear(body.heads * body.dim, body.hidden, bias=False)
        if body.head_norms:
            self.q_norm, self.k_norm = Norm(body.dim, body.epsilon), Norm(body.dim, body.epsilon)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], look: Look) -> torch.Tensor:
        """[*, T, inputs] to [*, T, hidden]; `rotary` holds cosines and sines [*, T, D]."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.dim)).transpose(-2, -3) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        out = look(self, rotate(query, *rotary), rotate(key, *rotary), value)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.up_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.down_proj = nn.Linear(body.ffn, body.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a gated perceptron, each behind a norm and around a residual."""

    def __init__(self, body: Body, layer: int, *, inputs: int, norm: bool = True) -> None:
        """`inputs` is what the attention reads; without `norm` it is handed over ready."""
        super().__init__()
        self.self_attn = Attention(body, inputs, layer)
        self.mlp = Gated(body)
        if norm:
            self.input_layernorm = Norm(body.hidden, body.epsilon)
        self.post_attention_layernorm = Norm(body.hidden, body.epsilon)

    def forward(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        look: Look,
        *,
        ready: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`ready` is what the attention reads where that is not the residual."""
        x = ready
        if x is None:
            x = self.input_layernorm(residual) if hasattr(self, "input_layernorm") else residual
        residual = residual + self.self_attn(x, rotary, look)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


def rotation(positions: torch.Tensor, body: Body, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [*, 1, T, D] of rotary positions [*, T] (Su et al. 2021), halves side by side."""
    powers = torch.arange(0, body.dim, 2, device=positions.device, dtype=torch.float32) / body.dim
    angles = positions[..., None, :, None].float() * body.theta**-powers
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn pairs (x_i, x_(i + D/2)) by their angles."""
    one, two = x.chunk(2, -1)
    return x * cosine + torch.cat([-two, one], -1) * sine
