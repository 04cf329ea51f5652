"""What a step of training reads, and what a draft says of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """Texts as the target has read them, side by side, padded behind."""

    tokens: torch.Tensor  # [B, L + 1] int64
    taps: torch.Tensor  # [B, L, taps, H] states of all tokens but the last
    laws: torch.Tensor  # [B, L, Vd] the target's probabilities of what can be guessed, after each of them
    learn: torch.Tensor  # [B, L] bool: whether its law is learned from


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """All guesses that lie as many guesses behind the target's own states."""

    logits: torch.Tensor  # [B, C, Vd] the draft's
    target: torch.Tensor  # [B, C, Vd] the target's probabilities, at the same places
    learn: torch.Tensor  # [B, C]
    confidence: torch.Tensor | None = None  # [B, C] log-odds of being kept, by the draft's own judgement, if it has any
