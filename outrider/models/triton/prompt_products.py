"""Products of prompts, in blocks of a fixed number of rows.

The kernel that cuBLAS chooses, and so the bits of a row, depend on the number of rows. In blocks of one size, they
depend on the row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider.models.triton.linear import linear, many_rows
from outrider.models.triton.passes import BLOCK_ROWS
from outrider.models.triton.quantized import Matrix


def linear_by_role(
    prompt_tokens: int,
    x: torch.Tensor,
    weight: Matrix,
    *,
    residual: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Do what `linear` does. The first `prompt_tokens` rows of `x` run in blocks, and the others on our kernel."""
    if not prompt_tokens:
        return linear(x, weight, residual=residual, **settings)
    parts = [
        _block(x[begin:end], weight, None if residual is None else residual[begin:end], settings)
        for begin in range(0, prompt_tokens, BLOCK_ROWS)
        if (end := min(begin + BLOCK_ROWS, prompt_tokens))
    ]
    if prompt_tokens < len(x):
        rest = None if residual is None else residual[prompt_tokens:]
        parts.append(linear(x[prompt_tokens:], weight, residual=rest, **settings))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _block(
    x: torch.Tensor,
    weight: Matrix,
    residual: torch.Tensor | None,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Multiply at most BLOCK_ROWS rows, as many rows with zeros."""
    rows = len(x)
    missing = (0, 0, 0, BLOCK_ROWS - rows)
    if rows < BLOCK_ROWS:
        x = functional.pad(x, missing)
        residual = None if residual is None else functional.pad(residual, missing)
    return many_rows(x, weight, residual=residual, **settings)[:rows]
