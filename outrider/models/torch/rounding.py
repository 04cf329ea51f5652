"""Tolerances for comparing two passes of a model over the same tokens."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

# Relative to the norm of the logits, by dtype of the weights.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
)
# The native kernels multiply quantized blocks with activations of 8 bits. A small random model
# amplifies their rounding to 10% of the norm; another architecture differs by 50% or more.
BLOCK_TOLERANCE = 0.2
# Keys and values in int8 are rounded to 1/254 of the largest number of a head.
INT8_CACHE_TOLERANCE = 0.06
# Comparisons that must all fail before a pass counts as wrong. Rounding may route a token to
# another expert, which changes its logits.
TRIALS = 4
# The router logit of a chosen expert may be below that of the worst expert of the router's own
# choice, by at most this factor times the tolerance of the logits, relative to the root mean square
# of the router logits. Both logits have an error, which is not the same for all experts.
TIE_FACTOR = 4.0
