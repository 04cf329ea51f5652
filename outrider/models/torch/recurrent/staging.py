"""Choose what a recurrent layer stages for a few tokens: the state after each token, or the inputs of the tokens.

With states, a pass writes a state for each token, and a commit copies one of them. With inputs, a pass reads the state
once and compares the tokens with each other as in attention, and a commit computes the state from the staged inputs.
States take fewer calls, and inputs move fewer bytes (`benchmarks/recurrent/ways.py` measures both).
"""

from typing import NamedTuple

import torch

# Numbers of a state that are read or written in the time of one call. The choice must not depend on a measurement of
# this process: both ways round differently, and a request with a seed has the same text after a restart.
_CALL = 3 << 14


class WayCosts(NamedTuple):
    """The work of a layer in a pass and a commit: calls of torch, and reads and writes of the whole state.

    The moves are counted in the code. The calls are fitted to `benchmarks/recurrent/ways.py`, since their times differ.
    """

    token_calls: int  # by states, for each token
    token_moves: int
    input_calls: int  # by inputs, for all tokens
    input_moves: int


def keeps_states(base: torch.Tensor, entries: int, costs: WayCosts) -> bool:
    """Return whether it takes less time to keep the state after each token than the inputs.

    Args:
        base: the state [B, ...] before the tokens.
        entries: the number of tokens.
        costs: of this kind of layer.
    """
    size = base.numel()
    commit = (2 if entries == 1 else 4) * size  # the only state is used as it is; one of several is copied first
    by_states = entries * (costs.token_calls * _CALL + costs.token_moves * size) + commit
    return by_states <= costs.input_calls * _CALL + costs.input_moves * size
