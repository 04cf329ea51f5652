"""A target around a target: everything is the inner one's, until a subclass says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.cache.base import Cache
from outrider.core.types import Batch, Draft, Grown, Scores, Trust
from outrider.models.base import Target


class Wrapped:
    """A `Target` that hands everything on; draft models are given other manners so."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.vocab, self.slots, self.context = inner.vocab, inner.slots, inner.context
        self.device, self.kernels = inner.device, inner.kernels

    @property
    def cache(self) -> Cache:
        return self.inner.cache

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        return self.inner.score(batch, draft, first)

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        return self.inner.grow(batch, vocab, trust)

    def export(self, layers: Sequence[int]) -> None:
        self.inner.export(layers)

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.inner.swap(weights, version)

    def bytes(self) -> int:
        return self.inner.bytes()
