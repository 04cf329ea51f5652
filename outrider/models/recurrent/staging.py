"""Choose what a recurrent layer stages for a few tokens: the state after each token, or the inputs of the tokens.

With states, a pass writes a state for each token, and a commit copies one of them. With inputs, a pass reads the state
once and compares the tokens with each other as in attention, and a commit computes the state from the staged inputs.
States take fewer operations, and inputs move fewer bytes (`benchmarks/recurrent/ways.py` measures both).
"""

from __future__ import annotations

import torch

_MAX_ENTRIES = 3
_MAX_NUMBERS = 1 << 17  # of the states after all entries of all sequences, which is 512 KB


def keeps_states(base: torch.Tensor, entries: int) -> bool:
    """Return whether the state after each of `entries` tokens is kept. `base` is the state [B, ...] before them."""
    return entries <= _MAX_ENTRIES and entries * base.numel() <= _MAX_NUMBERS
