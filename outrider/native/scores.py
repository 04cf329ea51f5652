"""Scores as a packed pass leaves them."""

from __future__ import annotations

from typing import Any

import torch

from outrider.types import Scores


class PackedScores(Scores):
    """Scores whose rows are padded to one width when somebody asks for all logits.

    In a large batch one row may have thirty guesses and the others none, and the padding is then most of what would be
    copied. Who only wants the likeliest tokens never pays for it.
    """

    __slots__ = ("_order", "_packed", "_shape")
    _packed: torch.Tensor  # [K, V]
    _order: (
        list[int] | None
    )  # where in it those of each row's nodes lie, row by row; None once they have been put there
    _shape: tuple[int, int, int]

    def __init__(self, packed: torch.Tensor, order: list[int], rows: int, **others: Any) -> None:
        """Of logits [K, V] in their `order`, by node, for so many rows."""
        parts = {"_packed": packed, "_order": order, "_shape": (rows, -1, packed.shape[-1])}
        for name, value in {"features": {}, "fed": {}, **others, **parts}.items():
            object.__setattr__(self, name, value)

    @property
    def logits(self) -> torch.Tensor:
        if self._order is not None:
            object.__setattr__(self, "_packed", self._packed[self._order])
            object.__setattr__(self, "_order", None)
        return self._packed.view(self._shape)
