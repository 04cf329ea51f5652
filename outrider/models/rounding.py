"""How far apart rounding alone may leave two passes of one model over the same tokens, and how often they are tried."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

# Of the logits' norm, by the type of the model's weights.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
)
TRIALS = 4  # rounding may send a token to another expert now and then; what is built wrong is wrong every time
