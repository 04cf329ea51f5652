"""Mamba-2 layers: Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2 (Dao and Gu 2024)."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from outrider.models.torch.recurrent import convolution, state_space
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, split_heads
from outrider.models.torch.recurrent.rows import Rows


class Mamba2Layer(RecurrentLayer):
    """A state matrix per head. B and C are shared by the heads of a group."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        if (multiplier := getattr(module, "ssm_in_multiplier", None)) is not None:  # Falcon-H1
            projected = module.in_proj(hidden * multiplier) * module.mup_vector.view(-1)
        else:
            projected = module.in_proj(hidden)
        gate, xbc, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], -1)
        return {"gate": gate, "xbc": xbc, "dt": dt}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        module = self.module
        shape = (1, module.num_heads, module.head_dim, module.ssm_state_size)
        state = inputs["xbc"].new_zeros(shape, dtype=torch.float32)
        return convolution.fresh(inputs["xbc"], module.conv_kernel_size) | {state_space.STATE: state}

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(inputs["gate"])

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        module = self.module
        xbc = convolution.advance(staged, inputs["xbc"], rows, module.conv1d.weight, module.conv1d.bias)
        group = module.n_groups * module.ssm_state_size
        active: torch.Tensor = module.act(xbc).float()
        x, b, c = torch.split(active, [module.intermediate_size, group, group], -1)
        x = split_heads(x, module.num_heads)
        dt = functional.softplus(inputs["dt"].float() + module.dt_bias.float())
        dt = dt.clamp(*getattr(module, "time_step_limit", (0.0, torch.inf)))
        decay = dt * -module.A_log.float().exp()
        out: torch.Tensor = state_space.advance(staged, x * dt[..., None], decay, self._heads(b), self._heads(c), rows)
        out = out + module.D.float()[:, None] * x
        return out.flatten(-2).to(inputs["gate"].dtype)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last) | state_space.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        gate = inputs["gate"]
        if isinstance(self.module.norm, torch.nn.Identity):  # Falcon-H1 without a norm
            gated = mixed * functional.silu(gate)
        else:
            gated = self.module.norm(mixed[None], gate[None])[0]
        return self.module.out_proj(gated.to(gate.dtype))  # type: ignore[no-any-return]

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat [B, L, G * N] for the heads of each group: [B, L, H, N]."""
        groups = self.module.n_groups
        return split_heads(values, groups).repeat_interleave(self.module.num_heads // groups, 2)
