"""RWKV-4 layers (Peng et al. 2023). Each layer mixes a token with the one before it, and one of them keeps averages."""

from collections.abc import Mapping
from typing import Any

import torch

from outrider.models.torch.recurrent import convolution
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors, add_entries, pick
from outrider.models.torch.recurrent.rows import Rows
from outrider.models.torch.recurrent.scan import scan

_STATE, _STATES = "state", "states"  # [B, 3, D] and [B, E, 3, D] float32: numerator, denominator, maximum
_LOWEST = -1e38  # the maximum over no tokens


class RwkvMixLayer(RecurrentLayer):
    """Base: the input of a token and that of the token before it."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        return {"x": hidden}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        return convolution.fresh(inputs["x"], 2)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return mixed

    def wrap(self, output: torch.Tensor) -> Any:
        return output, None

    def _mixed(self, staged: Staged, x: torch.Tensor, rows: Rows, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Mix each input with the one before it, by the weights of these names."""
        shift = torch.zeros(x.shape[-1], 1, 2, dtype=x.dtype, device=x.device)
        shift[..., 0] = 1.0
        before = convolution.advance(staged, x, rows, shift, None)
        weights = [getattr(self.module, f"time_mix_{name}").view(-1) for name in names]
        return [x * weight + before * (1 - weight) for weight in weights]


class RwkvChannelMix(RwkvMixLayer):
    """The feed-forward layer."""

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        module = self.module
        key, receptance = self._mixed(staged, inputs["x"], rows, ("key", "receptance"))
        value = module.value(module.key(key).relu().square())
        return module.receptance(receptance).sigmoid() * value  # type: ignore[no-any-return]


class RwkvTimeMix(RwkvMixLayer):
    """The layer that averages values with weights exp(key), which decay with the distance."""

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        state = inputs["x"].new_zeros(1, 3, self.module.attention_hidden_size, dtype=torch.float32)
        state[:, 2] = _LOWEST
        return super().fresh(inputs) | {_STATE: state}

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        module = self.module
        mixed = self._mixed(staged, inputs["x"], rows, ("key", "value", "receptance"))
        key, value = module.key(mixed[0]).float(), module.value(mixed[1]).float()
        receptance = module.receptance(mixed[2]).sigmoid()
        decay, bonus = -module.time_decay.float().exp(), module.time_first.float()
        averages: list[torch.Tensor] = []

        def step(index: int, before: torch.Tensor, out: torch.Tensor) -> None:
            numerator, denominator, _ = _add(before, key[:, index] + bonus, value[:, index]).unbind(1)
            averages.append(numerator / denominator)
            decayed = torch.stack([before[:, 0], before[:, 1], before[:, 2] + decay], 1)
            out.copy_(_add(decayed, key[:, index], value[:, index]))

        states = scan(staged.base[_STATE], staged.entries.get(_STATES), step, rows)
        add_entries(staged, {_STATES: states})
        average = torch.stack(averages, 1).to(receptance.dtype)
        return module.output(receptance * average)  # type: ignore[no-any-return]

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return super().state_after(staged, rows, last) | {_STATE: pick(staged.entries[_STATES], last)}


def _add(state: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Add a value of weight exp(key) to the sums [B, 3, D], which are relative to exp(maximum)."""
    numerator, denominator, maximum = state.unbind(1)
    highest = torch.maximum(maximum, key)
    old, new = (maximum - highest).exp(), (key - highest).exp()
    return torch.stack([old * numerator + new * value, old * denominator + new, highest], 1)
