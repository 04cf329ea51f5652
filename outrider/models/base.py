"""The target: a model, its cache, and one forward pass over feeds and guesses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from outrider.cache.base import LEAST_ROOM, Cache, Layout
from outrider.cache.recurrent import RecurrentCache
from outrider.cache.shared import BorrowedCache
from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.core.types import Batch, Dice, Draft, Grown, Memory, Scores, Tables, Trust
from outrider.errors import OutriderError, UnsupportedModel
from outrider.loader.checkpoint import Checkpoint
from outrider.models.attention import Reader
from outrider.models.cuda_graphs import CudaRecorder, Graphs, Recorder
from outrider.models.draft_chains import Watch
from outrider.models.prepack import can_prepack, load_weights, prepack, weight_bytes
from outrider.models.quantize import quantise
from outrider.models.static_pass import SpareCache, StaticModel
from outrider.models.submodel import excerpt_model, layer_stack, lend, refuse_to_swap, requantised_model
from outrider.native.target import NativeTarget

KERNELS = ("auto", "native", "torch")
_log = logging.getLogger("outrider")


class Target(Protocol):
    """Scores a batch in one pass.

    Law: a node's logits depend on the committed text and the node's ancestors only. `score` changes nothing but what
    the cache has staged; `swap` replaces weights, and what is cached under the old ones is then stale.
    """

    vocab: int
    slots: int  # rows at once
    context: int  # tokens a slot can hold, the guesses included
    device: torch.device
    kernels: str  # what runs the pass, for reports

    @property
    def cache(self) -> Cache:
        """What the engine admits to, commits to and releases."""

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        """Score the feed's end and every node; with `first` >= 0 nodes from `first` on alone (see `Cache.stage`)."""

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        """Feed, and let each row go on greedily by itself: a draft model's chain where nothing is left to chance.

        Guesses are ids below `vocab`. Every row has a budget of at least 1; all guesses but the last one are staged.
        With `trust` a row may stop earlier, where asking does not hold up the device.
        """

    def export(self, layers: Sequence[int]) -> None:
        """From now on put the outputs of these decoder layers, counted from 0, into `Scores.features` and `Scores.fed`.

        These and no others, whatever was asked for before: who has several drafts at work asks for all of their layers
        at once. While there are any the cache shares no texts: every token is fed.

        Raises:
            OutriderError: the target has no such layer, or cannot export any.
        """

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights, by the names that the model's own `state_dict` gives them."""

    def bytes(self) -> int:
        """Memory of the weights, in bytes."""


@runtime_checkable
class Drawer(Protocol):
    """A target that can draw the guesses of a chain as it grows, where their laws are softmaxes and nothing more."""

    def draw(self, batch: Batch, vocab: int, dice: Dice, trust: Trust | None = None) -> Grown:
        """`Target.grow`, with guesses as the `dice` fall."""


@runtime_checkable
class Divisible(Protocol):
    """A target that can draft for itself: with some of its layers, or with its weights in fewer bits.

    Law: what an excerpt or a copy does changes nothing that the target says; both follow when weights are swapped.
    """

    layers: int  # counted from 0

    def excerpt(self, layers: Sequence[int]) -> Target:
        """These layers alone, in rising order, between the target's own embedding and head.

        No weight is copied. Where they are the first ones the cache is the target's as well (see `BorrowedCache`), so
        that an excerpt of all layers says what the target says; any others have a cache of their own.
        """

    def requantised(self, bits: int) -> Target:
        """A copy with linear layers of 8 or 4 bits, and a cache of its own.

        Raises:
            OutriderError: it would be no smaller than the target, or the machine has no kernels for it.
        """

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Bytes of weights that a pass reads: in each layer, and in the head."""


@runtime_checkable
class Lender(Protocol):
    """A target on whose states drafts can be trained."""

    layers: int  # counted from 0

    def lend(self) -> Tables:
        """Its embeddings, final norm and output layer.

        Raises:
            OutriderError: they are not a table, an RMS norm and a linear layer without bias.
        """


class AttentionTarget:
    """Any decoder-only model whose layers all attend, through transformers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        slots: int,
        context: int,
        record: Recorder | None = None,
    ) -> None:
        """Prepare for `slots` rows of up to `context` tokens.

        With `record`, passes of fixed shapes are recorded where the model allows it (see `Graphs`).
        """
        self.vocab, self.device = checkpoint.vocab, checkpoint.device
        self.slots, self.context, self.version = slots, context, 0
        self._model, self._recorder = checkpoint.model, record
        self.layers = len(layer_stack(self._model)[1])
        self._embeddings = checkpoint.model.get_input_embeddings().num_embeddings
        self._copies: WeakSet[AttentionTarget] = WeakSet()  # with quantised weights
        self._memories: WeakSet[StaticCache] = WeakSet()  # of what was made from this one, too
        self._remember()
        self._begin()
        if not record and can_prepack(checkpoint.device, checkpoint.dtype):
            prepack(self._model)
        self._source: Any = None  # the model whose weights these are, or are made from

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        eager = partial(self._score, batch, draft, first)
        return (self.graphs and self.graphs.score(batch, draft, first, eager)) or eager()

    def graph_bytes(self) -> int:
        """Memory of recorded passes, which is neither weights nor cache, in bytes."""
        return self.graphs.bytes() if self.graphs else 0

    def _score(self, batch: Batch, draft: Draft, first: int) -> Scores:
        layout = self._memory.stage(batch, draft, first)
        logits = self._forward(layout, Reader(self._memory, layout))
        features = {layer: layout.per_node(out[0, layout.keep]) for layer, out in self._outputs.items()}
        fed = {layer: layout.per_feed(out[0]) for layer, out in self._outputs.items()} if first < 0 else {}
        return Scores(logits=layout.per_node(logits), features=features, fed=fed)

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        tokens = self.graphs.grow(batch, vocab if vocab < self.vocab else 0) if self.graphs else None
        if tokens is None:
            return grow_by_scores(self, batch, vocab, trust)
        return Grown(tokens=tokens, count=batch.budget)

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        refuse_to_swap(self._source)
        for model in (self, *self._copies):
            load_weights(model._model, weights)
        for memory in self._memories:
            memory.forget()
        self.version = version

    def bytes(self) -> int:
        return weight_bytes(self._model, beside=self._source)

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        head = torch.nn.ModuleList([self._model.get_output_embeddings()])
        return tuple(weight_bytes(layer) for layer in layer_stack(self._model)[1]), weight_bytes(head)

    def lend(self) -> Tables:
        config = self._model.config.get_text_config(decoder=True).to_dict()
        return replace(lend(self._model), memory=Memory(entries=self._memory.entries, config=config))

    def excerpt(self, layers: Sequence[int]) -> AttentionTarget:
        other = copy(self)
        other._model, other._source = excerpt_model(self._model, layers), self._model
        if tuple(layers) == tuple(range(len(layers))):
            other.cache = BorrowedCache(self.cache)
        else:
            other._remember()
        other._begin()
        other.kernels += f", {len(layers)} layers"
        return other

    def requantised(self, bits: int) -> AttentionTarget:
        other = copy(self)
        other._model, other._source = requantised_model(self._model, bits), self._model
        other._remember()
        other._begin()
        other.kernels += f" int{bits}"
        self._copies.add(other)
        return other

    def _remember(self) -> None:
        """Take a cache."""
        kind = SpareCache if self._recorder else StaticCache
        self._memory: StaticCache = kind(slots=self.slots, capacity=max(self.context, LEAST_ROOM), device=self.device)
        self._memories.add(self._memory)
        self.cache: Cache = self._memory

    def _begin(self) -> None:
        """What a copy does not have in common with the target that it was made from."""
        self.kernels, self._outputs = "torch", dict[int, torch.Tensor]()
        self._hooks: dict[int, RemovableHandle] = {}  # by the layer exported
        self.graphs = self._record(self._recorder) if self._recorder else None

    def _forward(self, layout: Layout, reader: Reader) -> torch.Tensor:
        """Logits [K, V] float32 of the columns that the layout keeps."""
        out = self._model(
            input_ids=layout.tokens.clamp(0, self._embeddings - 1)[None],
            position_ids=layout.positions[None],
            attention_mask=torch.ones_like(layout.tokens)[None],  # or transformers finds packed texts by itself
            use_cache=False,
            logits_to_keep=layout.keep,
            kv=reader,
        )
        logits = out.logits[0] if out.logits.shape[1] == len(layout.keep) else out.logits[0, layout.keep]
        return logits.float()  # type: ignore[no-any-return]

    def _record(self, record: Recorder) -> Graphs | None:
        assert isinstance(self._memory, SpareCache)
        try:
            self._static = StaticModel(self._model, list(layer_stack(self._model)[1]), self._memory, self._outputs)
        except UnsupportedModel as reason:
            _log.info("no passes are recorded: %s", reason)
            return None
        self.kernels = "graphs"
        return Graphs(self._static, slots=self.slots, record=record)

    def export(self, layers: Sequence[int]) -> None:
        if layers:
            self.cache.share(False)  # or the outputs at tokens that are cached already would be missing
        if set(layers) == self._hooks.keys():
            return
        stack = layer_stack(self._model)[1]
        if odd := [layer for layer in layers if not 0 <= layer < len(stack)]:
            raise OutriderError(f"layer {odd[0]} was asked for; this target's layers are 0 to {len(stack) - 1}")
        for hook in self._hooks.values():
            hook.remove()
        self._outputs.clear()
        self._hooks = {layer: stack[layer].register_forward_hook(partial(self._keep, layer)) for layer in set(layers)}
        if self.graphs and self._recorder:  # a recording puts out the layers of its time
            self.graphs = Graphs(self._static, slots=self.slots, record=self._recorder)

    def _keep(self, layer: int, _module: torch.nn.Module, _inputs: object, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if out.dim() != 3:  # [1, T, H]
            raise UnsupportedModel("its layers put out several streams at once, and a proposer asked for one")
        self._outputs[layer] = out


class RecurrentTarget:
    """A decoder-only model whose state is recurrent: rows are read one by one, a tree branch by branch."""

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        self.vocab, self.device = checkpoint.vocab, checkpoint.device
        self.slots, self.context, self.version, self.kernels = slots, context, 0, "torch"
        self.cache = RecurrentCache(slots=slots, device=self.device, fresh=self._fresh, advance=self._advance)
        self._model = checkpoint.model

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self.cache.stage(batch, draft, first)
        rows = [self._score_row(batch, draft, b) for b in range(len(batch.rows))]
        return Scores(logits=torch.stack(rows))

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        return grow_by_scores(self, batch, vocab, trust)

    def export(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError("a recurrent target exports no layers; use a proposer that needs none, such as ngram")

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        load_weights(self._model, weights)
        self.version = version

    def bytes(self) -> int:
        return weight_bytes(self._model)

    def _score_row(self, batch: Batch, draft: Draft, b: int) -> torch.Tensor:
        """Logits [1 + N, V] of row b; padding repeats the root's."""
        slot, feed = batch.rows[b].slot, torch.tensor(batch.feed[b], device=self.device)
        parents = draft.parent[b, : draft.width[b]].tolist()
        out: torch.Tensor | None = None
        for leaf in sorted(set(range(len(parents))) - set(parents)) or [-1]:
            path = tree.path(parents, leaf)
            guesses = draft.tokens[b, path].clamp(0, self.vocab - 1)
            chain = len(path) if path == list(range(len(parents))) else -1  # only a whole chain's state can be kept
            logits = self.cache.read(slot, torch.cat([feed, guesses]), chain)[len(feed) - 1 :]
            out = logits[0].expand(1 + draft.size, -1).clone() if out is None else out
            out[[node + 1 for node in path]] = logits[1:]
        assert out is not None
        return out

    def _fresh(self) -> Any:
        return DynamicCache(config=self._model.config)

    def _advance(self, state: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._model(input_ids=tokens[None], cache_params=state, use_cache=True).logits
        return logits[0].float()  # type: ignore[no-any-return]


def make_target(
    checkpoint: Checkpoint,
    *,
    slots: int,
    context: int,
    kernels: str = "auto",
    bits: int = 16,
) -> Target:
    """The target that fits the checkpoint's kind of memory and the machine.

    Args:
        checkpoint: what runs.
        slots: rows at once.
        context: tokens of a row.
        kernels: native, torch, or auto: native on a CPU and CUDA graphs on a GPU, where type and model allow it.
        bits: of the linear layers' weights: 16 as they are; 8 or 4 quantised, and then that is the checkpoint's model.

    Raises:
        UnsupportedModel: what was asked for by name cannot be had.
    """
    if kernels not in KERNELS:
        raise OutriderError(f"kernels {kernels!r} is unknown; use {', '.join(KERNELS)}")
    fits = checkpoint.device.type == "cpu" and checkpoint.dtype in (torch.bfloat16, torch.float32)
    if bits < 16 and not (fits and checkpoint.dtype == torch.bfloat16):
        raise OutriderError("quantize needs a CPU and bfloat16; use device cpu and dtype auto, or leave quantize out")
    fits &= not checkpoint.recurrent
    if kernels == "native" and not fits:
        raise OutriderError("the native kernels need a CPU, and bfloat16 or float32; use kernels auto, or dtype auto")
    if fits and kernels != "torch":
        try:
            return NativeTarget(checkpoint, slots=slots, context=context, bits=bits)
        except UnsupportedModel as reason:
            if kernels == "native":
                raise
            _log.info("running on torch: %s", reason)
    if bits < 16:
        quantise(checkpoint.model, bits)
    if checkpoint.recurrent:
        target: Target = RecurrentTarget(checkpoint, slots=slots, context=context)
    else:
        record = CudaRecorder(checkpoint.device) if checkpoint.device.type == "cuda" and kernels == "auto" else None
        target = AttentionTarget(checkpoint, slots=slots, context=context, record=record)
    target.kernels += "" if bits == 16 else f" int{bits}"
    return target


def grow_by_scores(target: Target, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
    """`Target.grow`, one pass of `score` after another."""
    draft = tree.empty(len(batch.rows), target.device)
    watch = Watch(batch.budget, trust if tree.near(target.device) else None)
    while watch.depth < max(watch.count):
        scores = target.score(batch, draft, first=watch.depth - 1)
        logits = scores.logits[:, -1, :vocab]
        tokens = torch.cat([draft.tokens, logits.argmax(-1, keepdim=True)], 1)
        watch.look(logits, tokens[:, -1], None if scores.sure is None else scores.sure[:, -1])
        draft = tree.chain(tokens, tuple(min(most, watch.depth) for most in watch.count))
    return Grown(tokens=draft.tokens, count=tuple(watch.count), margin=watch.margins, chance=watch.chances)
