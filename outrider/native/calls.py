"""Calls into the kernels: one pass, and chains that grow by themselves."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from outrider.core.types import DraftChains, Packed, StopRule, UniformDraws
from outrider.native.abi import CChain, Columns


class Passes:
    """What holds a model in the kernels' hands can run it."""

    _handle: int

    def __init__(self, code: Any, *, hidden: int) -> None:
        self._code, self._hidden, self._nothing = code, hidden, torch.empty(0)

    @property
    def vocab(self) -> int:
        """Outputs of the head."""
        raise NotImplementedError

    def run(
        self, columns: Columns, layers: Sequence[int] = (), state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, array[int], torch.Tensor]:
        """One pass.

        Args:
            columns: what is read, and of what logits are wanted.
            layers: whose outputs are wanted.
            state: [T, H] float32 before each column, for a draft that reads states; or [T, taps, target H], not fused.

        Returns:
            logits [K, V] float32 of the columns to keep, their likeliest ids [K] (-1 where the logits are not
            numbers), and the outputs [layers, T, H] of the layers asked for, of all columns.
        """
        kept = len(columns.keep)
        logits = torch.empty(kept, self.vocab)
        features = torch.empty(len(layers), len(columns.token), self._hidden) if layers else self._nothing
        best, exported = array("i", bytes(4 * kept)), array("i", layers)
        once = columns.c(logits.data_ptr(), best.buffer_info()[0], exported, features.data_ptr(), *_given(state))
        self._code.outrider_run(self._handle, ctypes.byref(once))
        return logits, best, features

    def grow(
        self,
        columns: Columns,
        budget: Sequence[int],
        vocab: int,
        trust: StopRule | None = None,
        *,
        dice: UniformDraws | None = None,
        state: torch.Tensor | None = None,
    ) -> DraftChains:
        """One pass, and guesses after it.

        Args:
            columns: each row's last column is kept; what follows it is written behind it.
            budget: [B] guesses wanted of each row, at least one.
            vocab: ids below it are guessed.
            trust: when a row stops earlier; None: never.
            dice: how guesses are drawn; None: greedily.
            state: as in `run`; behind a guess stands what came out of the column before it.
        """
        ends, rows, depth = list(columns.keep), len(budget), max(budget)
        weight, bias = (array("f", trust.weight), array("f", trust.bias)) if trust else (array("f", [0]),) * 2
        end = array("i", trust.ends if trust else ())
        worth = array("f", [trust.until(rows) if trust else 0.0 for rows in range(1, rows + 1)])
        read: tuple[array[Any], ...] = (
            array("i", [columns.slot[c] for c in ends]),
            array("i", [columns.position[c] + 1 for c in ends]),
            array("i", [columns.place[c] + 1 for c in ends]),
            array("i", budget),
            weight,
            bias,
            end,
        )
        found = _Found(budget, vocab if dice else 0)
        fields = [part.buffer_info()[0] for part in (*read, *found.parts(), worth)]
        wants = array("f", [part for want in dice.params for part in want] if dice else ())
        uniform = dice.uniform.contiguous() if dice else None
        fields += [0, 0] if uniform is None else [wants.buffer_info()[0], uniform.data_ptr()]
        fields += [0 if found.law is None else found.law.data_ptr(), found.law_at.buffer_info()[0]]
        chain = CChain(*fields, trust.min_path_prob if trust else 0.0, rows, depth, vocab, len(weight), len(end))
        once = columns.c(0, 0, array("i"), 0, *_given(state))
        self._code.outrider_grow(self._handle, ctypes.byref(once), ctypes.byref(chain))
        return found.grown(watched=trust is not None)


class _Found:
    """What the kernels write of chains, [B, K] unless another shape is given."""

    def __init__(self, budget: Sequence[int], vocab: int) -> None:
        """For so many guesses [B], drawn from laws over `vocab` ids; 0: taken greedily."""
        rows, depth = self._shape = len(budget), max(budget)
        self._budget = tuple(budget)
        self._token = array("i", bytes(4 * rows * depth))
        self._count, self._looked = (array("i", bytes(4 * rows)) for _ in range(2))  # [B]
        self._margin, self._chance = (array("f", bytes(4 * rows * depth)) for _ in range(2))
        self.law = torch.empty(sum(budget), vocab) if vocab else None  # [T, V]
        self.law_at = array("i", [-1]) * (rows * depth)

    def parts(self) -> tuple[array[Any], ...]:
        return self._token, self._count, self._looked, self._margin, self._chance

    def grown(self, *, watched: bool) -> DraftChains:
        q, tokens = None, torch.tensor(self._token.tolist()).view(self._shape)
        if self.law is not None:
            at = torch.tensor(self.law_at.tolist()).view(self._shape)
            q = Packed(values=self.law[: max(self.law_at) + 1], at=at)
        if not watched:
            return DraftChains(tokens=tokens, count=self._budget, q=q)
        margin, chance = self._looked_at(self._margin), self._looked_at(self._chance)
        return DraftChains(tokens=tokens, count=tuple(self._count), margin=margin, accept_prob=chance, q=q)

    def _looked_at(self, part: array[float]) -> tuple[tuple[float, ...], ...]:
        depth = self._shape[1]
        return tuple(tuple(part[b * depth : b * depth + n]) for b, n in enumerate(self._looked))


def _given(state: torch.Tensor | None) -> tuple[int, ...]:
    """The address of states, and whether they are as they were tapped."""
    if state is None:
        return ()
    assert state.dtype is torch.float32
    assert state.is_contiguous()
    return state.data_ptr(), state.dim() == 3
