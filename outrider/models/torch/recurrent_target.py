"""The target for models with recurrent layers, with or without attention layers."""

from typing import Any

import torch

from outrider.core.cache import Layout
from outrider.models.torch.attention import CacheReader
from outrider.models.torch.attention_target import AttentionTarget
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.torch.recurrent.cache import RecurrentCache
from outrider.models.torch.recurrent.registry import LAYERS, replace_layers
from outrider.models.torch.static_pass import SpareCache
from outrider.models.torch.submodel import layer_stack


class _SpareRecurrentCache(RecurrentCache, SpareCache):
    """The cache of recorded passes."""


class RecurrentTarget(AttentionTarget):
    """A decoder-only model some or all of whose layers are recurrent.

    The tokens of all sequences run as one packed batch. Attention layers read the KV cache, and
    recurrent layers the states (see `outrider.models.torch.recurrent`). Drafts may be trees.
    """

    padded = True  # recurrent layers read the tokens of all sequences in step

    # Copies of recurrent layers are not supported, so this is not a `SelfDraftTarget`.
    make_submodel = None  # type: ignore[assignment]
    make_requantized = None  # type: ignore[assignment]
    _memory: RecurrentCache

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int, record: Recorder | None = None) -> None:
        super().__init__(checkpoint, slots=slots, context=context, record=record)
        self._memory.states.layers = replace_layers(checkpoint.model, self._memory.states)

    def _make_cache(self, **settings: Any) -> RecurrentCache:
        return (_SpareRecurrentCache if self._recorder else RecurrentCache)(**settings)

    def _attention_layers(self) -> int:
        """Return at most the number of attention layers: layers may share a module."""
        names = [type(module).__name__ for module in layer_stack(self._model)[1].modules()]
        return sum(name.endswith("Attention") and name not in LAYERS for name in names)

    def _forward(self, layout: Layout, reader: CacheReader) -> torch.Tensor:
        with self._memory.states.running():
            return super()._forward(layout, reader)
