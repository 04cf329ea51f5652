"""The record of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model, its tokenizer, and facts of its configuration."""

    model: Any
    tokenizer: Any
    context: int  # tokens
    vocab: int  # ids that have logits
    end_ids: frozenset[int]  # tokens that end the text
    recurrent: bool
    dtype: torch.dtype
    device: torch.device
