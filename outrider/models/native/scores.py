"""Scores of a native forward pass, without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.core.types import Packed, Scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """Outputs of some layers at all columns of a pass, and the columns of each sequence."""

    layers: tuple[int, ...]
    values: torch.Tensor  # [layers, T, H]
    nodes: torch.Tensor  # [B, 1 + N] column of each node; padding repeats the first node of the sequence
    begin: tuple[int, ...]  # [B] first column of each feed; the draft tokens follow the feed
    feed: tuple[int, ...]  # [B] length of the feed; 0 if an earlier pass has computed the feeds

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        """Return [n, layers, H] at the feed of sequence b and at the nodes of `path`."""
        values = self.values
        if tuple(layers) != self.layers:
            values = values[list(map(self.layers.index, layers))]
        begin = self.begin[b]
        end = begin + self.feed[b]
        count = len(path)
        if tuple(path) == tuple(range(count)):
            return values[:, begin : end + count].transpose(0, 1)
        columns = [*range(begin, end), *(end + node for node in path)]
        return values[:, columns].transpose(0, 1)


class NativeScores(Scores):
    """Scores that are padded, copied and split only when a property is first used.

    Callers that need only the packed logits, the likeliest tokens, or the states at accepted tokens
    avoid that work.
    """

    __slots__ = ("_best", "_exported", "_host", "_packed", "_padded", "_values")
    _host: Sequence[Sequence[int]]  # [B, M] likeliest ids
    _best: torch.Tensor | None  # the same as a tensor; None before the first use
    _values: torch.Tensor  # [T, V] logits
    # Padding points to the first node of the sequence. None if all sequences have the same number
    # of nodes.
    _packed: Packed | None
    _padded: torch.Tensor | None  # [B, M, V] logits; None before the first use
    _exported: Exported | None

    def __init__(
        self,
        *,
        host: Sequence[Sequence[int]],
        logits: torch.Tensor,
        packed: Packed | None,
        exported: Exported | None,
    ) -> None:
        """Store the results of a pass.

        Args:
            host: [B, M] likeliest ids.
            logits: [T, V].
            packed: the logits by node; None if all sequences have the same number of nodes.
            exported: the outputs of exported layers, if any.
        """
        set_field = object.__setattr__
        set_field(self, "confidence", None)
        set_field(self, "_host", host)
        set_field(self, "_best", None)
        set_field(self, "_values", logits)
        set_field(self, "_padded", None)
        set_field(self, "_packed", packed)
        set_field(self, "_exported", exported)

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
        exported = self._exported
        if exported is None:
            return {}
        return {layer: out[exported.nodes] for layer, out in zip(exported.layers, exported.values, strict=True)}

    @property
    def feed_hidden_states(self) -> Mapping[int, tuple[torch.Tensor, ...]]:
        exported = self._exported
        if exported is None or not any(exported.feed):
            return {}
        spans = [(begin, begin + count) for begin, count in zip(exported.begin, exported.feed, strict=True)]
        states = {}
        for layer, out in zip(exported.layers, exported.values, strict=True):
            states[layer] = tuple(out[begin:end] for begin, end in spans)
        return states

    def states(self, layers: Sequence[int], b: int, path: Sequence[int]) -> torch.Tensor:
        assert self._exported is not None
        return self._exported.states(layers, b, path)
