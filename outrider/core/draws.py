"""How tokens are sampled: the parameters and the random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from outrider.core.types import SequenceState


class DrawParams(NamedTuple):
    """How to sample a token, after bias and penalties have changed the logits."""

    temperature: float  # 0: take the likeliest token
    top_k: int  # the vocabulary size: off
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The randomness that samples the tokens of a chain: one of `uniform` and `race_keys`."""

    params: tuple[DrawParams, ...]  # [B]
    # [B, K] float64 in [0, 1): a token is the first id whose cumulative probability exceeds the number.
    uniform: torch.Tensor | None = None
    race_keys: torch.Tensor | None = None  # [B, K] int64 of `PositionNoise.race_keys`
    adjusted: tuple[SequenceState, ...] = ()  # [B] sequences whose parameters change the logits first; empty: none do
