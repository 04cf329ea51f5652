"""Decoder layers of draft heads, of the Llama type. The caller computes the attention."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import Body
from outrider.models.heads.rotary import frequencies
from outrider.models.torch.rotary import rotate

# Called with the attention module, and its query, key and value, each [*, heads, T, D]. Returns the
# attention output [*, query heads, T, D].
AttentionFunction = Callable[["Attention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    """RMS norm in float32: x / rms(x) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, body: Body, inputs: int, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self.dim = body.dim
        # Size of a head in the query projection: the query, and then the gate if there is one.
        self.query_size = body.dim * (2 if body.attention_gate else 1)
        self.q_proj = nn.Linear(inputs, body.heads * self.query_size, bias=body.attention_bias)
        self.k_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.v_proj = nn.Linear(inputs, body.key_heads * body.dim, bias=body.attention_bias)
        self.o_proj = nn.Linear(body.heads * body.dim, body.hidden, bias=body.output_bias)
        if body.head_norms:
            self.q_norm = Norm(body.dim, body.epsilon)
            self.k_norm = Norm(body.dim, body.epsilon)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: AttentionFunction
    ) -> torch.Tensor:
        """Return outputs [*, T, hidden] for inputs [*, T, inputs]. `rotary` has cosines and sines [*, 1, T, D]."""
        query_and_gate = self.q_proj(x).unflatten(-1, (-1, self.query_size))
        query = query_and_gate[..., : self.dim].transpose(-2, -3)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        out = attend(self, rotate(query, *rotary), *self.keys_and_values(x, rotary)).transpose(-2, -3)
        if self.query_size > self.dim:
            out = out * query_and_gate[..., self.dim :].sigmoid()
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]

    def keys_and_values(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [*, key heads, T, D] of inputs [*, T, inputs]."""
        key = self._split_heads(self.k_proj(x))
        value = self._split_heads(self.v_proj(x))
        if hasattr(self, "k_norm"):
            key = self.k_norm(key)
        return rotate(key, *rotary), value

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.dim, self.dim).transpose(-2, -3)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), with GELU instead of SiLU for Gemma."""

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


class SquaredReluMLP(nn.Module):
    """down(relu(up x) ** 2) (So et al. 2021)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up_proj = nn.Linear(body.hidden, body.ffn, bias=False)
        self.down_proj = nn.Linear(body.ffn, body.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.relu(self.up_proj(x)).square())  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, body: Body, layer: int, *, inputs: int, norm: bool = True) -> None:
        """Create the layer.

        Args:
            body: the sizes.
            layer: its index in the KV cache.
            inputs: input size of the attention.
            norm: whether there is a norm before the attention.
        """
        super().__init__()
        self.self_attn = Attention(body, inputs, layer)
        self.mlp = GatedMLP(body) if body.gated else SquaredReluMLP(body)
        if norm:
            self.input_layernorm = Norm(body.hidden, body.epsilon)
        self.post_attention_layernorm = Norm(body.hidden, body.epsilon)

    def forward(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: AttentionFunction,
        *,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return outputs [*, T, hidden]. Without `attention_input`, the attention gets the normalized residual."""
        x = attention_input
        if x is None:
            x = self.input_layernorm(residual) if hasattr(self, "input_layernorm") else residual
        residual = residual + self.self_attn(x, rotary, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


def rotation(positions: torch.Tensor, body: Body, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [*, 1, T, R] of rotary positions [*, T], in two equal halves.

    R is the number of rotated dimensions of a head (Su et al. 2021).
    """
    radians_per_position, amplitude = frequencies(body, positions.device)
    angles = positions[..., None, :, None].float() * radians_per_position
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)
