"""Layers of the gated delta rule: Qwen3-Next, Qwen3.5, Lara, OLMo Hybrid, Kimi Linear and Bailing Hybrid."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from outrider.models.torch.recurrent import convolution, delta_rule
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, split_heads
from outrider.models.torch.recurrent.rows import Rows

_EPSILON = 1e-6  # added to the squared norm of queries and keys


class GatedDeltaLayer(RecurrentLayer):
    """Base of these layers. Subclasses compute the inputs from their own projections."""

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        qkv = inputs["qkv"]
        _, heads, key_dim, value_dim = self._sizes()
        state = qkv.new_zeros(1, heads, key_dim, value_dim, dtype=torch.float32)
        return convolution.fresh(qkv, self.module.conv_kernel_size) | {delta_rule.STATE: state}

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        _, heads, _, value_dim = self._sizes()
        return inputs["qkv"].new_empty(len(inputs["qkv"]), heads, value_dim)

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        conv = self.module.conv1d
        qkv = functional.silu(convolution.advance(staged, inputs["qkv"], rows, conv.weight, conv.bias)).float()
        key_heads, heads, key_dim, value_dim = self._sizes()
        parts = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        query, key, value = torch.split(qkv, parts, -1)
        query = _normalize(split_heads(query, key_heads)).repeat_interleave(heads // key_heads, 2) * key_dim**-0.5
        key = _normalize(split_heads(key, key_heads)).repeat_interleave(heads // key_heads, 2)
        value = split_heads(value, heads)
        new = delta_rule.Inputs(query, key, value, inputs["decay"], inputs["beta"])
        out: torch.Tensor = delta_rule.advance(staged, new, rows)
        return out.to(inputs["qkv"].dtype)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last) | delta_rule.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        normed = self.module.o_norm(mixed, inputs["gate"])
        return self.module.o_proj(normed.flatten(1))  # type: ignore[no-any-return]

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return the heads of queries and keys, those of values, and the sizes of both."""
        module = self.module
        return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim

    def _decay(self, a: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the decay [T, H]."""
        rate: torch.Tensor = self.module.A_log.float().exp()
        return -rate * functional.softplus(a.float() + self.module.dt_bias.float())


class QwenDeltaLayer(GatedDeltaLayer):
    """Qwen3-Next, Qwen3.5 and Lara."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next: interleaved by head
            packed = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
            query, key, value, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*packed))
            qkv = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], -1)
        else:
            qkv, b, a = module.in_proj_qkv(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
            z = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
        return {"qkv": qkv, "z": z, "beta": b.float().sigmoid(), "decay": self._decay(a)}

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        normed = self.module.norm(mixed.flatten(0, 1), inputs["z"].flatten(0, 1))
        return self.module.out_proj(normed.view(len(mixed), -1))  # type: ignore[no-any-return]


class OlmoDeltaLayer(GatedDeltaLayer):
    """OLMo Hybrid."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        qkv = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], -1)
        beta = module.b_proj(hidden).float().sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
        gate = module.g_proj(hidden).unflatten(-1, (-1, module.head_v_dim))
        return {"qkv": qkv, "gate": gate, "beta": beta, "decay": self._decay(module.a_proj(hidden))}


class KimiDeltaLayer(GatedDeltaLayer):
    """Kimi Linear and Bailing Hybrid, whose decay differs for each element of a key."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        if hasattr(module, "g_proj"):  # Bailing Hybrid
            gate = module.g_proj(hidden)
        else:
            gate = module.g_b_proj(module.g_a_proj(hidden))
        return {
            "qkv": torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], -1),
            "gate": gate.unflatten(-1, (-1, module.head_dim)),
            "beta": module.b_proj(hidden).float().sigmoid(),
            "decay": module.forget_gate(hidden[None])[0].float(),
        }

    def _sizes(self) -> tuple[int, int, int, int]:
        module = self.module
        return module.num_heads, module.num_heads, module.head_dim, module.head_dim


def _normalize(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + _EPSILON)
