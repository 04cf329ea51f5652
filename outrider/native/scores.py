"""Scores as a pass of the native kernels leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.types import Packed, Scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """Outputs of some layers at all columns of a pass, and where in it each row's lie."""

    layers: tuple[int, ...]
    values: torch.Tensor  # [layers, T, H]
    nodes: torch.Tensor  # [B, 1 + N] columns; padding repeats the first of its row
    begin: tuple[int, ...]  # [B] the first column of each feed; its guesses follow it
    feed: tuple[int, ...]  # [B] its length; 0 where feeds were read by an earlier pass

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        chosen = self.values
        if tuple(layers) != self.layers:
            chosen = chosen[[self.layers.index(layer) for layer in layers]]
        begin, end = self.begin[b], self.begin[b] + self.feed[b]
        count = len(path)
        if tuple(path) == tuple(range(count)):
            return chosen[:, begin : end + count].transpose(0, 1)
        columns = [*range(begin, end), *(end + node for node in path)]
        return chosen[:, columns].transpose(0, 1)


class NativeScores(Scores):
    """Scores of which nothing is padded, copied or taken apart before somebody asks for it.

    Who can do with the logits of the nodes that exist, with the likeliest tokens, or with the states at what was kept,
    never pays for more.
    """

    __slots__ = ("_exported", "_packed", "_padded")
    _packed: Packed | None  # padding points to the first of its row; None where the rows are of one length
    _padded: torch.Tensor | None  # [B, M, V], then or once somebody has asked
    _exported: Exported | None

    def __init__(
        self, *, best: torch.Tensor, logits: torch.Tensor | None, packed: Packed | None, exported: Exported | None
    ) -> None:
        """Give `logits` [B, M, V] or `packed`."""
        parts = {"best": best, "sure": None, "_padded": logits, "_packed": packed, "_exported": exported}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    @property
    def packed(self) -> Packed | None:
        return self._packed

    @property
    def logits(self) -> torch.Tensor:
        if self._padded is None:
            assert self._packed is not None
            object.__setattr__(self, "_padded", self._packed.values[self._packed.at])
        assert self._padded is not None
        return self._padded

    @property
    def features(self) -> Mapping[int, torch.Tensor]:
        it = self._exported
        return {} if it is None else {layer: out[it.nodes] for layer, out in zip(it.layers, it.values, strict=True)}

    @property
    def fed(self) -> Mapping[int, tuple[torch.Tensor, ...]]:
        it = self._exported
        if it is None or not any(it.feed):
            return {}
        spans = [(begin, begin + count) for begin, count in zip(it.begin, it.feed, strict=True)]
        outs = zip(it.layers, it.values, strict=True)
        return {layer: tuple(out[begin:end] for begin, end in spans) for layer, out in outs}

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        assert self._exported is not None
        return self._exported.states(layers, b, path)
