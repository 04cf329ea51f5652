"""Lightning attention: MiniMax. Linear attention with a constant decay for each head."""

from collections.abc import Mapping
from typing import Any

import torch

from outrider.models.torch.recurrent import state_space
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors
from outrider.models.torch.recurrent.rows import Rows


class LightningLayer(RecurrentLayer):
    """The recurrence of `state_space` with values for x, keys for B and queries for C."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        qkv = module.act_fn(module.qkv_proj(hidden)).unflatten(-1, (module.num_attention_heads, -1))
        query, key, value = qkv.split(module.head_dim, -1)
        gate = module.output_gate(hidden).sigmoid()
        return {"query": query, "key": key, "value": value, "gate": gate}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        heads, dim = inputs["value"].shape[1:]
        return {state_space.STATE: inputs["value"].new_zeros(1, heads, dim, dim, dtype=torch.float32)}

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(inputs["value"])

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        value = inputs["value"]
        decay = -self.module.slope_rate.float().view(-1).expand(value.shape[:3])
        out = state_space.advance(staged, value.float(), decay, inputs["key"].float(), inputs["query"].float(), rows)
        return out.to(value.dtype)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return state_space.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        normed = self.module.norm(mixed.flatten(1))
        return self.module.out_proj(inputs["gate"] * normed)  # type: ignore[no-any-return]

    def wrap(self, output: torch.Tensor) -> Any:
        return output, None
