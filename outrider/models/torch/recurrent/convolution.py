"""The causal convolution before most recurrences. Its state is the last inputs of a sequence."""

import torch

from outrider.models.torch.recurrent.layer import Staged, Tensors, add_entries
from outrider.models.torch.recurrent.rows import Rows

NAME = "conv"  # of the state [B, K - 1, C], and of the entries [B, E, C]


def fresh(inputs: torch.Tensor, size: int) -> Tensors:
    """Return the state [1, size - 1, C] of a sequence without tokens. `inputs` are [T, C]."""
    return {NAME: inputs.new_zeros(1, size - 1, inputs.shape[-1])}


def advance(
    staged: Staged, inputs: torch.Tensor, rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Add new inputs [B, L, C] and return the convolution [B, L, C].

    Args:
        staged: the state and the entries.
        rows: the order of the entries of each sequence.
        weight: [C, 1, K].
        bias: [C].
    """
    out = (windows(staged, inputs, rows, weight.shape[-1]) * weight[:, 0].T).sum(2)
    return out if bias is None else out + bias


def windows(staged: Staged, inputs: torch.Tensor, rows: Rows, size: int) -> torch.Tensor:
    """Add new inputs [B, L, C] and return the last `size` inputs up to each, [B, L, size, C]."""
    add_entries(staged, {NAME: inputs})
    if rows.is_chain:  # a view
        begin = rows.num_entries - rows.num_new
        return _inputs(staged)[:, begin:].unfold(1, size, 1).transpose(2, 3)
    return _windows(staged, rows.taps(size))


def state_after(staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
    """Return the state [B, K - 1, C] after entry `last` [B]."""
    size = staged.base[NAME].shape[1]
    return {NAME: _windows(staged, rows.last_taps(last, size)[:, None])[:, 0]}


def _windows(staged: Staged, taps: torch.Tensor) -> torch.Tensor:
    """Return the inputs [B, L, K, C] at the taps [B, L, K] (see `Rows.taps`)."""
    inputs = _inputs(staged)
    batch = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return inputs[batch, taps]


def _inputs(staged: Staged) -> torch.Tensor:
    """Return the inputs [B, K - 1 + E, C] of the state and of the entries."""
    return torch.cat([staged.base[NAME], staged.entries[NAME]], 1)
