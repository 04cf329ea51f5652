"""The target: a model, its cache, and one forward pass over feeds and guesses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from outrider import tree
from outrider.attention import Reader
from outrider.cache.base import Cache, Layout
from outrider.cache.recurrent import RecurrentCache
from outrider.cache.static import StaticCache
from outrider.errors import OutriderError, UnsupportedModel
from outrider.graphs import CudaRecorder, Graphs, Recorder
from outrider.load import Checkpoint
from outrider.native.target import NativeTarget
from outrider.prepack import PackedLinear, can_prepack, prepack, weight_bytes
from outrider.quantize import QuantisedLinear, quantise
from outrider.static_pass import SpareCache, StaticModel
from outrider.types import Batch, Draft, Scores

KERNELS = ("auto", "native", "torch")
_log = logging.getLogger("outrider")
_LEAST = 16  # tokens that a slot has room for at least: what the check before first use takes


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

    def grow(self, batch: Batch, vocab: int) -> torch.Tensor:
        """Feed, and let each row go on greedily by itself: a draft model's chain where nothing is left to chance.

        Row b of what returns [B, most of the budget] begins with `budget[b]` ids below `vocab`. Every row has a budget
        of at least 1; all guesses but the last one are staged.
        """

    def export(self, layers: Sequence[int]) -> None:
        """From now on put the outputs of these decoder layers, counted from 0, into `Scores.features`.

        Raises:
            OutriderError: the target has no such layer, or cannot export any.
        """

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights, by the names that the model's own `state_dict` gives them."""

    def bytes(self) -> int:
        """Memory of the weights, in bytes."""


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
        self.slots, self.context, self.version, self.kernels = slots, context, 0, "torch"
        kind = SpareCache if record else StaticCache
        self.cache: StaticCache = kind(slots=slots, capacity=max(context, _LEAST), device=checkpoint.device)
        self._model = checkpoint.model
        self._embeddings = checkpoint.model.get_input_embeddings().num_embeddings
        self._outputs: dict[int, torch.Tensor] = {}
        self.graphs = self._record(record) if record else None
        if not record and can_prepack(checkpoint.device, checkpoint.dtype):
            prepack(self._model)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        eager = partial(self._score, batch, draft, first)
        return (self.graphs and self.graphs.score(batch, draft, first, eager)) or eager()

    def graph_bytes(self) -> int:
        """Memory of recorded passes, which is neither weights nor cache, in bytes."""
        return self.graphs.bytes() if self.graphs else 0

    def _score(self, batch: Batch, draft: Draft, first: int) -> Scores:
        layout = self.cache.stage(batch, draft, first)
        logits = self._forward(layout, Reader(self.cache, layout))
        features = {layer: _per_node(out[0, layout.keep], layout, batch) for layer, out in self._outputs.items()}
        return Scores(logits=_per_node(logits, layout, batch), features=features)

    def grow(self, batch: Batch, vocab: int) -> torch.Tensor:
        grown = self.graphs.grow(batch, vocab if vocab < self.vocab else 0) if self.graphs else None
        return grow_by_scores(self, batch, vocab) if grown is None else grown

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        load_weights(self._model, weights)
        self.version = version

    def bytes(self) -> int:
        return weight_bytes(self._model)

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
        assert isinstance(self.cache, SpareCache)
        try:
            model = StaticModel(self._model, list(_decoder_layers(self._model)), self.cache, self._outputs)
        except UnsupportedModel as reason:
            _log.info("no passes are recorded: %s", reason)
            return None
        self.kernels = "graphs"
        return Graphs(model, slots=self.slots, record=record)

    def export(self, layers: Sequence[int]) -> None:
        stack = _decoder_layers(self._model) if layers else torch.nn.ModuleList()
        for layer in layers:
            if not 0 <= layer < len(stack):
                raise OutriderError(f"layer {layer} was asked for; this target's layers are 0 to {len(stack) - 1}")
            stack[layer].register_forward_hook(partial(self._keep, layer))

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

    def grow(self, batch: Batch, vocab: int) -> torch.Tensor:
        return grow_by_scores(self, batch, vocab)

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
            path = _path(parents, leaf)
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
    fits = checkpoint.device.type == "cpu" and checkpoint.dtype == torch.bfloat16
    if bits < 16 and not fits:
        raise OutriderError("quantize needs a CPU and bfloat16; use device cpu and dtype auto, or leave quantize out")
    fits &= not checkpoint.recurrent
    if kernels == "native" and not fits:
        raise OutriderError("the native kernels need a CPU and bfloat16; use kernels auto, or dtype bfloat16")
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


def grow_by_scores(target: Target, batch: Batch, vocab: int) -> torch.Tensor:
    """`Target.grow`, one pass of `score` after another."""
    draft = tree.empty(len(batch.rows), target.device)
    for depth in range(max(batch.budget)):
        logits = target.score(batch, draft, first=depth - 1).logits
        tokens = torch.cat([draft.tokens, logits[:, -1, :vocab].argmax(-1, keepdim=True)], 1)
        draft = tree.chain(tokens, tuple(min(budget, depth + 1) for budget in batch.budget))
    return draft.tokens


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model by their names, all or none; packed layers are packed anew."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    twins = {**{source: target for target, source in tied.items()}, **tied}
    kinds = PackedLinear | QuantisedLinear
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    packed = {f"{name}.weight": layer for name, layer in layers.items()}
    plain = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    plain |= {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}
    for name, value in weights.items():
        if name not in packed and name not in plain:
            raise OutriderError(f"the model has no weight {name!r}; use the names of its state_dict")
        if value.shape != (shape := packed[name].shape if name in packed else plain[name].shape):
            raise OutriderError(f"{name} has shape {tuple(value.shape)}; give {tuple(shape)}")
    # A packed layer holds a copy of the weight that it shares with another.
    both = {**{twins[name]: value for name, value in weights.items() if name in twins}, **weights}
    for name, value in both.items():
        if name in packed:
            packed[name].load(value)
        else:
            plain[name].data.copy_(value)


def _path(parents: Sequence[int], leaf: int) -> list[int]:
    """Nodes from the root's child down to `leaf`; -1 is the root itself."""
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = parents[leaf]
    return path[::-1]


def _per_node(values: torch.Tensor, layout: Layout, batch: Batch) -> torch.Tensor:
    """[K, ...] of the kept columns as [B, M, ...] of the nodes asked for."""
    if layout.nodes is not None:
        return values[layout.nodes]
    return values.view(len(batch.rows), -1, *values.shape[1:])


def _decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The stack of decoder layers: the first module list as long as the configuration says."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    assert stacks, "no stack of decoder layers"
    return stacks[0]
