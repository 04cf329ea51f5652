"""A finished text with the states that its writer was in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What is learned from."""

    id: int  # of the request
    tokens: tuple[int, ...]  # L + 1
    states: torch.Tensor  # [L, layers, H] bfloat16, outputs of the layers asked for, at all tokens but the last
    prompt: int  # how many of the tokens were given
    shown: torch.Tensor | None = None  # [L, n] bfloat16, keys and values of the layers asked for, one behind another
