"""Define a base class for targets that wrap another target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from outrider.core.cache import Cache
from outrider.core.types import Batch, Draft, DraftChains, Scores, StopRule

if TYPE_CHECKING:
    from outrider.core.target import Target


def unwrapped(model: Target) -> Target:
    """Return the target inside of all wrappers."""
    while isinstance(model, WrappedTarget):
        model = model.inner
    return model


class WrappedTarget:
    """A `Target` that passes calls on to another one. Subclasses override some of the calls."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.vocab = inner.vocab
        self.slots = inner.slots
        self.context = inner.context
        self.device = inner.device
        self.kernels = inner.kernels

    @property
    def cache(self) -> Cache:
        return self.inner.cache

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        return self.inner.score(batch, draft, first)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self.inner.draft_greedy(batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        self.inner.export_hidden_states(layers)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.inner.update_weights(weights, version)

    def bytes(self) -> int:
        return self.inner.bytes()
