"""Scores as a pass of the native kernels leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.core.types import Packed, Scores


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

    __slots__ = ("_best", "_exported", "_host", "_packed", "_padded", "_values")
    _host: Sequence[Sequence[int]]  # [B, M] the likeliest ids
    _best: torch.Tensor | None  # the same, once somebody has asked
    _values: torch.Tensor  # [T, V] logits
    _packed: Packed | None  # padding points to the first of its row; None where the rows are of one length
    _padded: torch.Tensor | None  # [B, M, V], once somebody has asked
    _exported: Exported | None

    def __init__(
        self,
        *,
        host: Sequence[Sequence[int]],
        logits: torch.Tensor,
        packed: Packed | None,
        exported: Exported | None,
    ) -> None:
        """Give the likeliest ids [B, M], `logits` [T, V], and `packed` where rows are not of one length."""
        put = object.__setattr__
        put(self, "confidence", None)
        put(self, "_host", host)
        put(self, "_best", None)
        put(self, "_values", logits)
        put(self, "_padded", None)
        put(self, "_packed", packed)
        put(self, "_exported", exported)

    @property
    def host(self) -> Sequence[Sequence[int]]:
        return self._host

    @property
    def best(self) -> torch.Tensor:
        if self._best is None:
            object.__setattr__(self, "_best", torch.tensor(self._host))
        assert self._best is not None
        return self._best

    @property
    def packed(self) -> Packed | None:
        return self._packed

    @property
    def logits(self) -> torch.Tensor:
        if self._padded is None:
            values, packed = self._values, self._packed
            padded = values.view(len(self._host), -1, values.shape[-1]) if packed is None else values[packed.at]
            object.__setattr__(self, "_padded", padded)
        assert self._padded is not None
        return self._padded

    @property
    def hidden_states(self) -> Mapping[int, torch.Tensor]:
        it = self._exported
        return {} if it is None else {layer: out[it.nodes] for layer, out in zip(it.layers, it.values, strict=True)}

    @property
    def feed_hidden_states(self) -> Mapping[int, tuple[torch.Tensor, ...]]:
        it = self._exported
        if it is None or not any(it.feed):
            return {}
        spans = [(begin, begin + count) for begin, count in zip(it.begin, it.feed, strict=True)]
        outs = zip(it.layers, it.values, strict=True)
        return {layer: tuple(out[begin:end] for begin, end in spans) for layer, out in outs}

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        assert self._exported is not None
        return self._exported.states(layers, b, path)
