"""Mamba-1 layers: Mamba, Falcon Mamba and Jamba (Gu and Dao 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from outrider.models.recurrent import convolution
from outrider.models.recurrent.layer import RecurrentLayer, Staged, Tensors, add_entries, pick
from outrider.models.recurrent.rows import Rows
from outrider.models.recurrent.scan import linear_scan

_STATE, _STATES = "state", "states"  # [B, D, N] and [B, E, D, N] float32


class MambaLayer(RecurrentLayer):
    """A selective state space of N numbers per channel, whose decay differs for each number."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        x, gate = self.module.in_proj(hidden).chunk(2, -1)
        return {"x": x, "gate": gate}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        x = inputs["x"]
        state = x.new_zeros(1, *self.module.A_log.shape, dtype=torch.float32)
        return convolution.fresh(x, self.module.conv_kernel_size) | {_STATE: state}

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(inputs["x"])

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        module = self.module
        convolved = convolution.advance(staged, inputs["x"], rows, module.conv1d.weight, module.conv1d.bias)
        x: torch.Tensor = module.act(convolved)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, b, c = module.x_proj(x).split(sizes, -1)
        if hasattr(module, "dt_layernorm"):  # Jamba and Falcon Mamba
            time_step, b, c = module.dt_layernorm(time_step), module.b_layernorm(b), module.c_layernorm(c)
        dt = functional.softplus(module.dt_proj(time_step).float())[..., None]  # [B, L, D, 1]
        decay = (dt * -module.A_log.float().exp()).exp()
        update = dt * b.float()[..., None, :] * x.float()[..., None]
        states = linear_scan(staged.base[_STATE], staged.entries.get(_STATES), decay, update, rows)
        add_entries(staged, {_STATES: states})
        out: torch.Tensor = (states @ c.float()[..., None])[..., 0] + module.D.float() * x.float()
        return out.to(x.dtype)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last) | {_STATE: pick(staged.entries[_STATES], last)}

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.module.out_proj(mixed * functional.silu(inputs["gate"]))  # type: ignore[no-any-return]
