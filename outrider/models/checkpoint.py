"""A loaded model with its tokenizer and the facts of its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model with what its folder says about it."""

    model: Any
    tokenizer: Any
    context: int  # tokens
    vocab: int
    end_ids: frozenset[int]
    recurrent: bool
    dtype: torch.dtype
    device: torch.device
