"""Recurrent blocks of Griffin: RecurrentGemma (De et al. 2024)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from outrider.models.torch.recurrent import convolution
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, add_entries, pick, split_heads
from outrider.models.torch.recurrent.rows import Rows
from outrider.models.torch.recurrent.scan import linear_scan

_STATE, _STATES = "state", "states"  # [B, D] and [B, E, D] float32
_EXPONENT = -8.0  # of the recurrence gate


class GriffinLayer(RecurrentLayer):
    """A convolution and a real-gated linear recurrent unit (RG-LRU): one number per channel."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        module = self.module
        return {"x": module.linear_x(hidden), "y": module.act_fn(module.linear_y(hidden)), "first": positions == 0}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        x = inputs["x"]
        state = x.new_zeros(1, x.shape[-1], dtype=torch.float32)
        return convolution.fresh(x, self.module.conv1d_width) | {_STATE: state}

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        conv, unit = self.module.conv_1d, self.module.rg_lru
        x = convolution.advance(staged, inputs["x"], rows, conv.weight, conv.bias)
        input_gate = _block_linear(x, unit.input_gate_weight, unit.input_gate_bias).sigmoid()
        recurrence_gate = _block_linear(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias).sigmoid()
        log_decay = _EXPONENT * recurrence_gate * functional.softplus(unit.recurrent_param)
        first = inputs["first"][..., None]
        scale = torch.where(first, 1.0, (1 - (2 * log_decay).exp()).sqrt()).to(x.dtype)
        decay = log_decay.exp() * ~first
        update = x * input_gate * scale
        states = linear_scan(staged.base[_STATE], staged.entries.get(_STATES), decay.float(), update.float(), rows)
        add_entries(staged, {_STATES: states})
        return states.to(x.dtype)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last) | {_STATE: pick(staged.entries[_STATES], last)}

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.module.linear_out(mixed * inputs["y"])  # type: ignore[no-any-return]

    def wrap(self, output: torch.Tensor) -> Any:
        return output, None


def _block_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Multiply blocks of channels [B, L, D] with their own matrices [blocks, D / blocks, D / blocks]."""
    blocks = split_heads(x, len(weight))
    return (torch.einsum("blhi,hij->blhj", blocks, weight) + bias).flatten(-2)
