"""Decoder layers of trained drafts, as Llama has them; who sees whom is the caller's business."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from outrider.heads.description import Body
from outrider.heads.rotary import frequencies

# (the attention, query, key, value), each [*, heads, T, D], to [*, query heads, T, D]
AttentionInput = Callable[["Attention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
        self.asked = body.dim * (2 if body.attention_gate else 1)  # of a head: the query, and the gate behind it
        self.q_proj = nn.Linear(inputs, body.heads * self.asked, bias=body.attention_bias)
        self.k_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.v_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.o_proj = nn.Linear(body.heads * body.dim, body.hidden, bias=body.output_bias)
        if body.head_norms:
            self.q_norm, self.k_norm = Norm(body.dim, body.epsilon), Norm(body.dim, body.epsilon)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], look: AttentionInput) -> torch.Tensor:
        """[*, T, inputs] to [*, T, hidden]; `rotary` holds cosines and sines [*, T, D]."""
        asked = self.q_proj(x).unflatten(-1, (-1, self.asked))
        query = asked[..., : self.dim].transpose(-2, -3)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        out = look(self, rotate(query, *rotary), *self.shown(x, rotary)).transpose(-2, -3)
        if self.asked > self.dim:
            out = out * asked[..., self.dim :].sigmoid()
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def shown(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*, key heads, T, D] by which columns [*, T, inputs] are seen."""
        key, value = self._parted(self.k_proj(x)), self._parted(self.v_proj(x))
        if hasattr(self, "k_norm"):
            key = self.k_norm(key)
        return rotate(key, *rotary), value

    def _parted(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.dim, self.dim).transpose(-2, -3)


class Gated(nn.Module):
    """down(silu(gate x) * up x), or gelu as Gemma has it."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.gelu = body.gemma
        self.gate_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.up_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.down_proj = nn.Linear(body.ffn, body.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        gate = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


class Squared(nn.Module):
    """down(relu(up x) ** 2) (So et al. 2021)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.down_proj = nn.Linear(body.ffn, body.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.relu(self.up_proj(x)).square())  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self, body: Body, layer: int, *, inputs: int, norm: bool = True) -> None:
        """`inputs` is what the attention reads; without `norm` it is handed over ready."""
        super().__init__()
        self.self_attn = Attention(body, inputs, layer)
        self.mlp = Gated(body) if body.gated else Squared(body)
        if norm:
            self.input_layernorm = Norm(body.hidden, body.epsilon)
        self.post_attention_layernorm = Norm(body.hidden, body.epsilon)

    def forward(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        look: AttentionInput,
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
    """Cosines and sines [*, 1, T, D * rotary] of rotary positions [*, T] (Su et al. 2021), halves side by side."""
    speeds, amplitude = frequencies(body, positions.device)
    angles = positions[..., None, :, None].float() * speeds
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn pairs (x_i, x_(i + R/2)) of the first R numbers by their angles [*, R]."""
    size = cosine.shape[-1]
    if not size:
        return x
    one, two = x[..., :size].chunk(2, -1)
    turned = x[..., :size] * cosine + torch.cat([-two, one], -1) * sine
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)
