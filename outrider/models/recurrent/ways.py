"""Choose how a few tokens of a recurrent layer are processed: by the state after each, or by their inputs.

By states, a state is written for each token, and a commit copies one of them. By inputs, the state is read once, the
tokens are compared with each other as in attention, and a commit computes the state from the kept inputs. By states
takes fewer operations, and by inputs moves fewer bytes (`benchmarks/recurrent/ways.py`).
"""

from __future__ import annotations

import torch

_MAX_ENTRIES = 3
_MAX_NUMBERS = 1 << 17  # of the states after all entries of all sequences, which is 512 KB


def keeps_states(base: torch.Tensor, entries: int) -> bool:
    """Return whether the state after each of `entries` tokens is kept. `base` is the state [B, ...] before them."""
    return entries <= _MAX_ENTRIES and entries * base.numel() <= _MAX_NUMBERS
