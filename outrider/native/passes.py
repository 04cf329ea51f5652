"""Calls into the kernels: one pass, and chains that grow by themselves."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from outrider.native.abi import CChain, Columns
from outrider.types import Grown, Trust


class Passes:
    """What holds a model in the kernels' hands can run it."""

    _handle: int

    def __init__(self, code: Any, *, hidden: int) -> None:
        self._code, self._hidden = code, hidden

    @property
    def vocab(self) -> int:
        """Outputs of the head."""
        raise NotImplementedError

    def run(
        self, columns: Columns, layers: Sequence[int] = (), state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One pass.

        Args:
            columns: what is read, and of what logits are wanted.
            layers: whose outputs are wanted.
            state: [T, H] float32 before each column, for a draft that reads states.

        Returns:
            logits [K, V] float32 of the columns to keep, their likeliest ids [K] int64 (-1 where the logits are not
            numbers), and the outputs [layers, T, H] of the layers asked for, of all columns.
        """
        kept, read = len(columns.keep), len(columns.token)
        logits, features = torch.empty(kept, self.vocab), torch.empty(len(layers), read, self._hidden)
        best, exported = array("i", bytes(4 * kept)), array("i", layers)
        once = columns.c(logits.data_ptr(), best.buffer_info()[0], exported, features.data_ptr(), _address(state))
        self._code.outrider_run(self._handle, ctypes.byref(once))
        return logits, torch.tensor(best, dtype=torch.int64), features

    def grow(
        self,
        columns: Columns,
        budget: Sequence[int],
        vocab: int,
        trust: Trust | None = None,
        *,
        state: torch.Tensor | None = None,
    ) -> Grown:
        """One pass, and greedy guesses after it.

        Args:
            columns: each row's last column is kept; what follows it is written behind it.
            budget: [B] guesses wanted of each row, at least one.
            vocab: ids below it are guessed.
            trust: when a row stops earlier; None: never.
            state: as in `run`; behind a guess stands what came out of the column before it.
        """
        ends, rows, depth = list(columns.keep), len(budget), max(budget)
        token, count, looked = (array("i", bytes(4 * size)) for size in (rows * depth, rows, rows))
        margin, chance = array("f", bytes(4 * rows * depth)), array("f", bytes(4 * rows * depth))
        weight, bias = (array("f", trust.weight), array("f", trust.bias)) if trust else (array("f", [0]),) * 2
        end = array("i", trust.ends if trust else ())
        worth = array("f", [trust.until(rows) if trust else 0.0 for rows in range(1, rows + 1)])
        fields = (
            array("i", [columns.slot[c] for c in ends]),
            array("i", [columns.position[c] + 1 for c in ends]),
            array("i", [columns.place[c] + 1 for c in ends]),
            array("i", budget),
            weight,
            bias,
            end,
            token,
            count,
            looked,
            margin,
            chance,
            worth,
        )
        keep, kinds = trust.keep if trust else 0.0, len(weight)
        chain = CChain(*(part.buffer_info()[0] for part in fields), keep, rows, depth, vocab, kinds, len(end))
        once = columns.c(0, 0, array("i"), 0, _address(state))
        self._code.outrider_grow(self._handle, ctypes.byref(once), ctypes.byref(chain))
        tokens = torch.tensor(token, dtype=torch.int64).view(rows, depth)
        if trust is None:
            return Grown(tokens=tokens, count=tuple(budget))
        return Grown(
            tokens=tokens,
            count=tuple(count),
            margin=tuple(tuple(margin[b * depth : b * depth + n]) for b, n in enumerate(looked)),
            chance=tuple(tuple(chance[b * depth : b * depth + n]) for b, n in enumerate(looked)),
        )


def _address(state: torch.Tensor | None) -> int:
    if state is None:
        return 0
    assert state.dtype is torch.float32
    assert state.is_contiguous()
    return state.data_ptr()
