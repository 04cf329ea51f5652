"""Recurrences that keep the state after each token."""

from collections.abc import Callable

import torch

from outrider.models.torch.recurrent.rows import Rows


def scan(
    base: torch.Tensor,  # [B, ...]
    earlier: torch.Tensor | None,  # [B, E - L, ...] states of the entries that were staged before
    step: Callable[[int, torch.Tensor, torch.Tensor], object],
    rows: Rows,
) -> torch.Tensor:
    """Return the states [B, L, ...] after the new entries.

    `step(index, before, out)` writes the state [B, ...] after new entry `index` to `out`, from the state before it.
    """
    # The state of one entry is contiguous, so that products of matrices need no copy of it.
    num_earlier = rows.num_entries - rows.num_new
    if rows.is_chain:
        states = base.new_empty(rows.num_new, *base.shape)
        before = base if earlier is None else earlier[:, -1]
        for index in range(rows.num_new):
            step(index, before, states[index])
            before = states[index]
        return states.transpose(0, 1)
    every = base.new_empty(1 + rows.num_entries, *base.shape)  # the base first
    every[0] = base
    if earlier is not None:
        every[1 : 1 + num_earlier] = earlier.transpose(0, 1)
    batch = torch.arange(len(base), device=base.device)
    for index in range(rows.num_new):
        entry = num_earlier + index
        step(index, every[rows.parent[:, entry] + 1, batch], every[1 + entry])
    return every[1 + num_earlier :].transpose(0, 1)


def linear_scan(
    base: torch.Tensor,  # [B, ...]
    earlier: torch.Tensor | None,  # [B, E - L, ...]
    decay: torch.Tensor,  # [B, L, ...], broadcast
    update: torch.Tensor,  # [B, L, ...]
    rows: Rows,
) -> torch.Tensor:
    """Do what `scan` does with steps `decay * before + update`."""

    def step(index: int, before: torch.Tensor, out: torch.Tensor) -> None:
        torch.addcmul(update[:, index], decay[:, index], before, out=out)

    return scan(base, earlier, step, rows)
