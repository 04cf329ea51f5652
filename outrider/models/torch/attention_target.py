"""The target for decoder-only attention models. transformers runs the layers over Outrider's KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

from outrider.core.cache import MIN_CAPACITY, Cache, Layout
from outrider.core.target import draft_by_scores
from outrider.core.types import Batch, Draft, DraftChains, KVView, Scores, SharedWeights, StopRule
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.cache.shared import SharedCache
from outrider.models.cache.static import StaticCache
from outrider.models.torch.attention import CacheReader
from outrider.models.torch.attention_layers.registry import replace_attention
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.cuda_graphs import Graphs
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.torch.graph_buckets import MAX_TOKENS
from outrider.models.torch.prepack import PackedLinear, can_prepack, load_weights, loadable, prepack, weight_bytes
from outrider.models.torch.quantize import QuantizedLinear
from outrider.models.torch.routing import ExpertRecorder
from outrider.models.torch.static_pass import SpareCache, StaticModel
from outrider.models.torch.submodel import (
    layer_stack,
    make_submodel,
    refuse_weight_update,
    requantized_model,
    shared_weights,
)

_log = logging.getLogger("outrider")
# Bytes of one logit during the largest recorded pass: in the dtype of the weights for all passes, and twice as float32.
_LOGIT_BYTES = 10


class AttentionTarget:
    """A decoder-only model whose layers all use attention."""

    _prepacks = True  # whether linear layers are packed, if the machine has kernels for that

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int, record: Recorder | None = None) -> None:
        """Prepare for `slots` sequences of up to `context` tokens.

        With `record`, passes of fixed shapes are recorded as graphs, if the model allows it (see `Graphs`).
        """
        self.vocab = checkpoint.vocab
        self.device = checkpoint.device
        self.slots = slots
        self.context = context
        self.version = 0
        self._model = checkpoint.model
        self._ranks = checkpoint.ranks  # of tensor parallelism
        self._recorder = record
        self.layers = len(layer_stack(self._model)[1])
        self._embeddings = checkpoint.model.get_input_embeddings().num_embeddings
        self._copies: WeakSet[AttentionTarget] = WeakSet()  # quantized copies
        self._caches: WeakSet[StaticCache] = WeakSet()  # caches of this target and its copies
        # On a GPU, counting would wait for the device.
        self._recorded = ExpertRecorder(self._model) if checkpoint.device.type == "cpu" else None
        self._allocate_cache()
        self._reset()
        if not record and self._prepacks and self._ranks == 1 and can_prepack(checkpoint.device, checkpoint.dtype):
            prepack(self._model)
        self._source: Any = None  # the model that this one shares weights with or was quantized from

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        eager = partial(self._score, batch, draft, first)
        return (self.graphs and self.graphs.score(batch, draft, first, eager)) or eager()

    def graph_bytes(self) -> int:
        """Bytes of recorded passes, besides weights and cache."""
        return self.graphs.bytes() if self.graphs else 0

    def _score(self, batch: Batch, draft: Draft, first: int) -> Scores:
        layout = self._memory.stage(batch, draft, first)
        if self._recorded:
            self._recorded.clear()
        logits = self._forward(layout, CacheReader(self._memory, layout))
        for layer, out in self._outputs.items():
            self._memory.write_outputs(layer, layout, out[0])
        states = {layer: layout.per_node(out[0, layout.keep]) for layer, out in self._outputs.items()}
        feed_states = {}
        if first < 0:
            feed_states = {layer: layout.per_feed(out[0]) for layer, out in self._outputs.items()}
        return Scores(logits=layout.per_node(logits), hidden_states=states, feed_hidden_states=feed_states)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        tokens = self.graphs.draft_greedy(batch, vocab if vocab < self.vocab else 0) if self.graphs else None
        if tokens is None:
            return draft_by_scores(self, batch, vocab, stop_rule)
        return DraftChains(tokens=tokens, count=batch.draft_budget)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._refuse_ranks("new weights cannot be loaded into")
        refuse_weight_update(self._source)
        for model in (self, *self._copies):
            load_weights(model._model, weights)
        for cache in self._caches:
            cache.forget()
        self.version = version

    def bytes(self) -> int:
        return weight_bytes(self._model, excluding=self._source)

    def weight_names(self) -> frozenset[str]:
        weights = nn.Parameter | PackedLinear | QuantizedLinear  # the other stored tensors are buffers
        return frozenset(name for name, value in self._stored().items() if isinstance(value, weights))

    def stored_weights(self) -> Mapping[str, torch.Tensor]:
        stored = self._stored().items()
        return {name: value if isinstance(value, torch.Tensor) else value.weight for name, value in stored}

    def sleep(self, *, weights: bool) -> None:
        if self.graphs:
            raise OutriderError("recorded passes keep their memory; use kernels torch to sleep")
        self._refuse_ranks("sleep does not support")
        if weights:
            stored = self._stored().values()
            if self._copies or not all(isinstance(value, torch.Tensor) for value in stored):
                raise OutriderError("the packed weights of this target cannot be freed; use level 1")
            for value in stored:
                if isinstance(value, nn.Parameter):
                    value.data = torch.empty_like(value)  # in place of memory that may be a part of a file
                    value.untyped_storage().resize_(0)
        for cache in self._caches:
            cache.free()

    def wake(self) -> None:
        for tensor in self._stored().values():
            if isinstance(tensor, torch.Tensor) and not tensor.untyped_storage().size():
                tensor.untyped_storage().resize_(tensor.nbytes)

    def _stored(self) -> Mapping[str, torch.Tensor | PackedLinear | QuantizedLinear]:
        return loadable(self._model)

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        head = torch.nn.ModuleList([self._model.get_output_embeddings()])
        return tuple(map(weight_bytes, layer_stack(self._model)[1])), weight_bytes(head)

    def touched_experts(self) -> float | None:
        return self._recorded.touched() if self._recorded else None

    def chosen_experts(self) -> list[torch.Tensor]:
        return self._recorded.chosen() if self._recorded else []

    def expert_bytes(self) -> int:
        experts = [module for name, module in self._model.named_modules() if name.endswith(".experts")]
        return sum(map(weight_bytes, experts))

    def share_weights(self) -> SharedWeights:
        config = self._model.config.get_text_config(decoder=True).to_dict()
        return replace(shared_weights(self._model), kv_view=KVView(entries=self._memory.entries, layer_config=config))

    def make_submodel(self, layers: Sequence[int]) -> AttentionTarget:
        other = copy(self)
        other._model = make_submodel(self._model, layers)
        other._source = self._model
        if tuple(layers) == tuple(range(len(layers))):
            other.cache = SharedCache(self.cache)
        else:
            other._allocate_cache()
        other._reset()
        other.kernels += f", {len(layers)} layers"
        return other

    def make_requantized(self, bits: int) -> AttentionTarget:
        self._refuse_ranks("a quantized draft cannot be made from")
        other = copy(self)
        other._model = requantized_model(self._model, bits)
        other._source = self._model
        if self._model.dtype == other._model.dtype:
            other.cache = SharedCache(self.cache)
        else:
            other._allocate_cache()
        other._reset()
        other.kernels += f" int{bits}"
        self._copies.add(other)
        return other

    def _refuse_ranks(self, action: str) -> None:
        """Raise if this process has a part of the model only."""
        if self._ranks > 1:
            raise OutriderError(f"{action} a target that is split over ranks, and tp is {self._ranks}; use tp 1")

    def _on_ranks(self, kernels: str) -> str:
        """Return the name of the kernels, with the number of ranks."""
        return kernels if self._ranks == 1 else f"{kernels}, {self._ranks} ranks"

    def _allocate_cache(self) -> None:
        self._memory: StaticCache = self._make_cache(
            slots=self.slots,
            capacity=max(self.context, MIN_CAPACITY),
            device=self.device,
            layers=self._attention_layers(),
            reserve=_LOGIT_BYTES * MAX_TOKENS * self.vocab,
        )
        self._caches.add(self._memory)
        self.cache: Cache = self._memory

    def _make_cache(self, **settings: Any) -> StaticCache:
        return (SpareCache if self._recorder else StaticCache)(**settings)

    def _attention_layers(self) -> int:
        """Return the number of layers with keys and values, for the check of the memory."""
        return len(layer_stack(self._model)[1])

    def _reset(self) -> None:
        """Reset what a copy does not share with its source."""
        self.kernels = self._on_ranks("torch")
        self._replaced = replace_attention(self._model)
        self._outputs: dict[int, torch.Tensor] = {}  # of the last pass, by exported layer
        self._hooks: dict[int, RemovableHandle] = {}  # by exported layer
        self.graphs = self._record(self._recorder) if self._recorder else None

    def _forward(self, layout: Layout, reader: CacheReader) -> torch.Tensor:
        """Return logits [K, V] float32 of the columns that the layout keeps."""
        with self._replaced.over(reader) if self._replaced else nullcontext():
            out = self._run(layout, reader)
        if skipped := self._hooks.keys() - self._outputs.keys():
            raise UnsupportedModel(
                f"the model skips layer {min(skipped)} in a pass over text, and a proposer needs"
                " its hidden states; use another proposer"
            )
        logits = out.logits[0] if out.logits.shape[1] == len(layout.keep) else out.logits[0, layout.keep]
        return logits.float()  # type: ignore[no-any-return]

    def _run(self, layout: Layout, reader: CacheReader) -> Any:
        return self._model(
            input_ids=layout.tokens.clamp(0, self._embeddings - 1)[None],
            position_ids=layout.positions[None],
            # With a mask, transformers does not try to detect packed sequences itself.
            attention_mask=torch.ones_like(layout.tokens)[None],
            use_cache=False,
            logits_to_keep=layout.keep,
            kv=reader,
        )

    def _record(self, record: Recorder) -> Graphs | None:
        """Return the recorded passes; None if the model does not support them."""
        assert isinstance(self._memory, SpareCache)
        if self._replaced:
            _log.info("no passes are recorded: Outrider replaces the attention layers of this model")
            return None
        try:
            self._static = StaticModel(self._model, list(layer_stack(self._model)[1]), self._memory, self._outputs)
        except UnsupportedModel as reason:
            _log.info("no passes are recorded: %s", reason)
            return None
        self.kernels = self._on_ranks("graphs")
        return Graphs(self._static, slots=self.slots, record=record)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        if layers and self.graphs:
            self.cache.set_prefix_caching(False)  # recorded passes do not store the outputs of cached tokens
        if set(layers) == self._hooks.keys():
            return
        stack = layer_stack(self._model)[1]
        if invalid := [layer for layer in layers if not 0 <= layer < len(stack)]:
            raise OutriderError(f"this target has no layer {invalid[0]}; use layers 0 to {len(stack) - 1}")
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._outputs.clear()
        self._memory.drop_outputs()
        for layer in set(layers):
            module = self._exporting_module(layer)
            self._hooks[layer] = module.register_forward_hook(partial(self._save_output, layer))
        if self.graphs and self._recorder:
            # The recorded passes export other layers.
            self.graphs = Graphs(self._static, slots=self.slots, record=self._recorder)

    def cached_hidden_states(self, slot: int, layers: Sequence[int], end: int) -> torch.Tensor:
        return self._memory.outputs(slot, layers, end)

    def _exporting_module(self, layer: int) -> torch.nn.Module:
        """Return the module whose output is exported as that of a layer."""
        return layer_stack(self._model)[1][layer]

    def _save_output(self, layer: int, _module: torch.nn.Module, _inputs: object, output: Any) -> None:
        out = output[0] if isinstance(output, tuple | ModelOutput) else output
        if out.dim() != 3:  # [1, T, H]
            raise UnsupportedModel("its layers have several output streams, and a proposer needs one")
        self._outputs[layer] = out
