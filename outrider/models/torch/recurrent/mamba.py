"""Mamba-1 layers: Mamba, Falcon Mamba, Jamba and Zamba (Gu and Dao 2023)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from outrider.models.torch.recurrent import convolution
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, add_entries, pick, split_heads
from outrider.models.torch.recurrent.rows import Rows
from outrider.models.torch.recurrent.scan import linear_scan

_STATE, _STATES = "state", "states"  # [B, D, N] and [B, E, D, N] float32


class _Selection(NamedTuple):
    """The values that the input selects. H is the groups of channels: 1, or Zamba's heads."""

    time_step: torch.Tensor  # [B, L, D] before the softplus
    b: torch.Tensor  # [B, L, H, N]
    c: torch.Tensor  # [B, L, H, N]


class MambaLayer(RecurrentLayer):
    """A selective state space of N numbers per channel, whose decay differs for each number."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        x, gate = self.module.in_proj(hidden).chunk(2, -1)
        return {"x": x, "gate": gate}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        x = inputs["x"]
        state = x.new_zeros(1, *self._log_rates().shape, dtype=torch.float32)
        return convolution.fresh(x, self.module.conv_kernel_size) | {_STATE: state}

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        module = self.module
        convolved = convolution.advance(staged, inputs["x"], rows, module.conv1d.weight, module.conv1d.bias)
        x: torch.Tensor = module.act(convolved)
        selection = self.select(x)
        heads = selection.b.shape[2]
        dt = functional.softplus(selection.time_step.float())  # [B, L, D]
        decay = (dt[..., None] * -self._log_rates().float().exp()).exp()
        scaled = split_heads(dt * x.float(), heads)
        update = (scaled[..., None] * selection.b.float()[..., None, :]).flatten(2, 3)  # [B, L, D, N]
        states = linear_scan(staged.base[_STATE], staged.entries.get(_STATES), decay, update, rows)
        add_entries(staged, {_STATES: states})
        read = states.view(*states.shape[:2], heads, -1, states.shape[-1]) @ selection.c.float()[..., None]
        out: torch.Tensor = read.flatten(2) + module.D.float().flatten() * x.float()
        return out.to(x.dtype)

    def select(self, x: torch.Tensor) -> _Selection:
        """Return what the convolved inputs [B, L, D] select."""
        module = self.module
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, b, c = module.x_proj(x).split(sizes, -1)
        if hasattr(module, "dt_layernorm"):  # Jamba and Falcon Mamba
            time_step, b, c = module.dt_layernorm(time_step), module.b_layernorm(b), module.c_layernorm(c)
        return _Selection(module.dt_proj(time_step), b[..., None, :], c[..., None, :])

    def _log_rates(self) -> torch.Tensor:
        """Return the logarithm of the decay rates, [D, N]."""
        return self.module.A_log.flatten(0, -2)  # type: ignore[no-any-return]

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last) | {_STATE: pick(staged.entries[_STATES], last)}

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.module.out_proj(mixed * functional.silu(inputs["gate"]))  # type: ignore[no-any-return]


class ZambaLayer(MambaLayer):
    """Zamba, whose heads have projections of their own."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        x, gate = self.module.in_proj(hidden).unflatten(-1, (-1, 2)).unbind(-1)
        return {"x": x, "gate": gate}

    def select(self, x: torch.Tensor) -> _Selection:
        module = self.module
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        heads = split_heads(x, module.n_mamba_heads)[..., None]  # [B, L, H, D / H, 1]
        time_step, b, c = (module.x_proj_weight @ heads)[..., 0].split(sizes, -1)
        time_step = (module.dt_proj_weight @ time_step[..., None])[..., 0] + module.dt_proj_bias
        return _Selection(time_step.flatten(2), b, c)
