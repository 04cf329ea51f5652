"""The target for models with recurrent layers, with or without attention layers."""

from __future__ import annotations

import torch

from outrider.cache.base import MIN_CAPACITY, Cache, Layout
from outrider.models.attention import CacheReader
from outrider.models.attention_target import AttentionTarget
from outrider.models.checkpoint import Checkpoint
from outrider.models.recurrent.cache import RecurrentCache
from outrider.models.recurrent.registry import replace_layers


class RecurrentTarget(AttentionTarget):
    """A decoder-only model some or all of whose layers are recurrent.

    The tokens of all sequences run as one packed batch. Attention layers read the KV cache, and recurrent layers the
    states (see `outrider.models.recurrent`). Drafts may be trees.
    """

    padded = True  # recurrent layers read the tokens of all sequences in step

    # Copies of recurrent layers are not supported, so this is no `SelfDraftTarget`.
    make_submodel = None  # type: ignore[assignment]
    make_requantized = None  # type: ignore[assignment]

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        super().__init__(checkpoint, slots=slots, context=context)
        self._memory.states.layers = replace_layers(checkpoint.model, self._memory.states)

    def _allocate_cache(self) -> None:
        self._memory: RecurrentCache = RecurrentCache(
            slots=self.slots, capacity=max(self.context, MIN_CAPACITY), device=self.device
        )
        self._caches.add(self._memory)
        self.cache: Cache = self._memory

    def _forward(self, layout: Layout, reader: CacheReader) -> torch.Tensor:
        with self._memory.states.running():
            return super()._forward(layout, reader)
