"""Choose what a recurrent layer stages for a few tokens: the state after each token, or the inputs of the tokens.

With states, a pass writes a state for each token, and a commit copies one of them. With inputs, a pass reads the state
once and compares the tokens with each other as in attention, and a commit computes the state from the staged inputs.
States take fewer operations, and inputs move fewer bytes (`benchmarks/recurrent/ways.py` measures both).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keeps_states(base: torch.Tensor, entries: int, limits: Sequence[int]) -> bool:
    """Return whether the state after each of a few tokens is kept.

    Args:
        base: the state [B, ...] before them.
        entries: the number of tokens.
        limits: for 1, 2, ... tokens: up to so many numbers of the states after all tokens of all sequences, states are
            faster than inputs in this kind of layer. More tokens are always processed by inputs.
    """
    return entries <= len(limits) and entries * base.numel() <= limits[entries - 1]
