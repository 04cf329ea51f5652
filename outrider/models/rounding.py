"""Tolerances for comparing two passes of a model over the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

# Relative to the norm of the logits, by dtype of the weights.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
)
# Comparisons that must fail. Rounding may route a token to another expert, which changes its logits.
TRIALS = 4
