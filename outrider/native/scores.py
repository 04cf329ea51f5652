"""Scores as a packed pass leaves them."""

from __future__ import annotations

from typing import Any

import torch

from outrider.types import Packed, Scores


class PackedScores(Scores):
    """Scores whose rows are padded to one width when somebody asks for all logits.

    Who can do with those of the nodes that exist, or with the likeliest tokens, never pays for it.
    """

    __slots__ = ("_packed", "_padded")
    _packed: Packed  # padding points to the first of its row
    _padded: torch.Tensor | None  # [B, M, V], once somebody has asked

    def __init__(self, packed: Packed, **others: Any) -> None:
        parts = {"_packed": packed, "_padded": None}
        for name, value in {"features": {}, "fed": {}, **others, **parts}.items():
            object.__setattr__(self, name, value)

    @property
    def packed(self) -> Packed:
        return self._packed

    @property
    def logits(self) -> torch.Tensor:
        if self._padded is None:
            object.__setattr__(self, "_padded", self._packed.values[self._packed.at])
        assert self._padded is not None
        return self._padded
