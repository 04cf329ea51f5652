"""Recurrences that keep the state after each token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.models.recurrent.rows import Rows


def scan(
    base: torch.Tensor,  # [B, ...]
    earlier: torch.Tensor | None,  # [B, E - L, ...] states of the entries that were staged before
    step: Callable[[int, torch.Tensor], torch.Tensor],
    rows: Rows,
) -> torch.Tensor:
    """Return the states [B, L, ...] after the new entries.

    `step(index, before)` returns the state [B, ...] after new entry `index`, from the state before it.
    """
    if rows.is_chain:
        before = base if earlier is None else earlier[:, -1]
        states = []
        for index in range(rows.num_new):
            before = step(index, before)
            states.append(before)
        return states[0][:, None] if len(states) == 1 else torch.stack(states, 1)
    num_earlier = rows.num_entries - rows.num_new
    every = base.new_empty(len(base), 1 + rows.num_entries, *base.shape[1:])  # the base first
    every[:, 0] = base
    if earlier is not None:
        every[:, 1 : 1 + num_earlier] = earlier
    batch = torch.arange(len(base), device=base.device)
    for index in range(rows.num_new):
        entry = num_earlier + index
        every[:, 1 + entry] = step(index, every[batch, rows.parent[:, entry] + 1])
    return every[:, 1 + num_earlier :]


def linear_scan(
    base: torch.Tensor,  # [B, ...]
    earlier: torch.Tensor | None,  # [B, E - L, ...]
    decay: torch.Tensor,  # [B, L, ...], broadcast
    update: torch.Tensor,  # [B, L, ...]
    rows: Rows,
) -> torch.Tensor:
    """Do what `scan` does with steps `decay * before + update`."""
    return scan(base, earlier, lambda index, before: torch.addcmul(update[:, index], decay[:, index], before), rows)
