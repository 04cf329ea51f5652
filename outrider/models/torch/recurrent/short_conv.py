"""Gated short convolutions: LFM2 and LFM3."""

from collections.abc import Mapping

import torch

from outrider.models.torch.recurrent import convolution
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors
from outrider.models.torch.recurrent.rows import Rows


class ShortConvLayer(RecurrentLayer):
    """A causal convolution of a few tokens, gated before and after. Its inputs are all of its state."""

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        b, c, x = self.module.in_proj(hidden).chunk(3, -1)
        return {"x": b * x, "c": c}

    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        return convolution.fresh(inputs["x"], self.module.conv.kernel_size[0])

    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        return convolution.advance(staged, inputs["x"], rows, self.module.conv.weight, self.module.conv.bias)

    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        return convolution.state_after(staged, rows, last)

    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.module.out_proj(inputs["c"] * mixed)  # type: ignore[no-any-return]
