"""A pass of fixed shape, so that it can be recorded once and replayed.

Everything that changes between rounds (token ids, write positions, lengths, tree structure) is in
buffers. The pass is a function of the buffers and the cache. Sequence r is in slot r. Padding
writes to a spare entry at the end of each slot, which is never read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.core.cache import pack
from outrider.core.tree import ancestors, empty, upload
from outrider.core.types import Batch, Draft, DraftBudget
from outrider.errors import UnsupportedModel
from outrider.models.cache.static import StaticCache
from outrider.models.torch.attention import Fixed, MaskRule, has_grouped_kernel
from outrider.models.torch.recurrent.fixed import FixedRun, StagedRows, tree_rows
from outrider.models.torch.recurrent.rows import chain_rows, chunk_ends
from outrider.models.torch.recurrent.states import RecurrentStates


class SpareCache(StaticCache):
    """A static cache with one more entry per slot, for padding."""

    def __init__(self, *, slots: int, capacity: int, device: torch.device, layers: int = 1, reserve: int = 0) -> None:
        super().__init__(slots=slots, capacity=capacity + 1, device=device, layers=layers, reserve=reserve)
        self.spare = capacity

    def reserve(self, batch: Batch, draft_sizes: Sequence[int], skip: int = -1) -> None:
        """Reserve entries as `stage` does, without making a layout."""
        self._set_sequences(batch)
        for seq, start, feed, count in zip(batch.seqs, batch.start, batch.feed, draft_sizes, strict=True):
            if skip < 0 or count > skip:
                stop = start + len(feed) + count
                assert stop <= self.spare, "slot overflow"
                self._open(seq.slot, stop)

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the keys and values of a layer for all slots; None before its first write."""
        return (self._keys[layer], self._values[layer]) if layer in self._keys else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shape of a pass."""

    rows: int  # slots 0 to rows - 1
    columns: int  # tokens per sequence
    length: int  # cache entries per slot
    trees: bool = False
    steps: int = 0  # length of a greedy draft; 0: the pass scores
    vocab: int = 0  # drafted ids are below it; 0: all


def round_integers(bucket: Bucket, batch: Batch, draft: Draft, first: int, spare: int) -> list[int]:
    """Return the integers of one round, with the layout of `Cache.stage`, ordered by slot.

    They are, in this order:

    - for each token, its id, or ~i for draft token i of the flat draft [R * L] in batch order
    - for each token, the entry where it is written
    - for each slot, the entry of node 0
    - for each node in batch order, its token
    - for each slot, its budget
    - for each sequence of the batch, its slot
    """
    rows = bucket.rows
    size = bucket.columns
    source = [0] * (rows * size)
    entries = [spare] * (rows * size)
    nodes = [0] * (rows * size)
    base = [0] * rows
    budget = [0] * rows
    slots = [0] * rows
    for b, span in enumerate(pack(batch, draft.width, first)):
        length = span.end - span.begin
        begin = span.slot * size
        end = begin + length
        feed = batch.feed[b] if first < 0 else ()
        source[begin:end] = [*feed, *(~(b * size + j) for j in range(span.nodes))]
        entries[begin:end] = range(span.start, span.start + length)
        seq_nodes = [begin - span.begin + column for column in span.outputs] or [begin]
        padding = seq_nodes[:1] * (size - len(seq_nodes))  # repeats the first node
        nodes[b * size : (b + 1) * size] = seq_nodes + padding
        base[span.slot] = span.base
        budget[span.slot] = batch.draft_budget[b]
        slots[b] = span.slot
    return source + entries + base + nodes + budget + slots


@dataclass(slots=True, kw_only=True, eq=False)
class Stage:
    """The inputs of the wrapped layers in one pass of fixed shape."""

    entries: torch.Tensor  # [R, L] entry of the slot where each token is written
    positions: torch.Tensor  # [R, L]
    visible: torch.Tensor  # [R, L, S] bool, by position and tree
    entry_positions: torch.Tensor  # [R, S] the position of each entry
    dtype: torch.dtype
    compiled: bool
    masks: dict[tuple[MaskRule | None, int], torch.Tensor]

    def mask(self, mask_rule: MaskRule | None, sharing: int) -> torch.Tensor:
        """Return `Fixed.mask`. It is made once for all layers with the same rule."""
        if (mask_rule, sharing) not in self.masks:
            visible = self.visible
            device = visible.device
            if mask_rule is not None and mask_rule.reach is not None and visible.shape[-1] > mask_rule.reach:
                zero = torch.zeros((), dtype=torch.int64, device=device)  # index of sequence and head
                positions = self.positions[..., None]
                visible = visible & mask_rule.rule(zero, zero, positions, self.entry_positions[:, None])
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, -torch.inf)
            self.masks[mask_rule, sharing] = mask.repeat(1, sharing, 1)[:, None]
        return self.masks[mask_rule, sharing]


class _Layer:
    """The `forward` of a decoder layer. In passes of fixed shape it gives the layer its part of the cache.

    A compiled layer receives only tensors, so equal layers share one compilation.
    """

    def __init__(self, layer: Any, cache: SpareCache, *, may_lack_keys: bool) -> None:
        indexed = [module for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        if len({module.layer_idx for module in indexed}) != 1:
            raise UnsupportedModel("its layers have no unique layer_idx")
        self._sharing = max(getattr(module, "num_key_value_groups", 1) for module in indexed)
        self.index: int = indexed[0].layer_idx
        self._cache = cache
        self._may_lack_keys = may_lack_keys  # whether the model has recurrent layers
        self._eager = layer.forward
        self._grouped: bool | None = None  # `has_grouped_kernel`; None: not tried
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = kwargs.get("kv")
        if not isinstance(stage, Stage):
            return self._eager(*args, **kwargs)
        mask_rules = {arg for arg in (*args, *kwargs.values()) if isinstance(arg, MaskRule)}
        cached = self._cache.of(self.index)
        if len(mask_rules) > 1 or (cached is None and not self._may_lack_keys):
            raise UnsupportedModel("its layers use several attention masks at once")
        kwargs["kv"] = None
        if cached is not None:
            mask = stage.mask(mask_rules.pop() if mask_rules else None, self._sharing)
            keys, values = cached
            if self._grouped is None:
                self._grouped = has_grouped_kernel(keys, self._sharing)
            kwargs["kv"] = Fixed(keys=keys, values=values, entries=stage.entries, mask=mask, grouped=self._grouped)
        args = tuple(None if isinstance(arg, MaskRule) else arg for arg in args)
        kwargs = {name: None if isinstance(arg, MaskRule) else arg for name, arg in kwargs.items()}
        return self._function(stage)(*args, **kwargs)

    def _function(self, stage: Stage) -> Callable[..., Any]:
        """Return the compiled or the eager forward of the layer."""
        if not stage.compiled:
            return self._eager  # type: ignore[no-any-return]
        if self._compiled is None:
            # One compilation for all numbers of sequences, tokens and entries. Each that is 1 needs
            # one more.
            self._compiled = torch.compile(self._eager, fullgraph=True, dynamic=True)
        return self._compiled


class StaticModel:
    """A model whose layers also support passes of fixed shape."""

    def __init__(
        self, model: Any, layers: Sequence[Any], cache: SpareCache, outputs: Mapping[int, torch.Tensor]
    ) -> None:
        """Wrap the decoder `layers` of `model`. Passes write exported outputs to `outputs`.

        Raises:
            UnsupportedModel: the layers have no index.
        """
        # The cache of a model with recurrent layers has their states.
        self.states: RecurrentStates | None = getattr(cache, "states", None)
        wrapped = [_Layer(layer, cache, may_lack_keys=self.states is not None) for layer in layers]
        self.layers = tuple(wrapper.index for wrapper in wrapped)
        if len(set(self.layers)) < len(wrapped):
            raise UnsupportedModel("its layers have no unique layer_idx")
        for layer, wrapper in zip(layers, wrapped, strict=True):
            layer.forward = wrapper
        self.model = model
        self.cache = cache
        self.outputs = outputs
        self.compiled = False  # whether passes use the compiled layers
        self._logits: torch.Tensor | None = None  # of the last scoring pass, [N, V]
        self.dtype: torch.dtype = model.get_output_embeddings().weight.dtype
        self._embeddings: int = model.get_input_embeddings().num_embeddings
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def ready(self) -> bool:
        """Return whether the cache is allocated."""
        if states := self.states:  # layers without recurrence may have neither keys nor states
            return states.ready()
        return all(self.cache.of(layer) is not None for layer in self.layers)

    def takes(self, batch: Batch, first: int) -> bool:
        """Return whether a pass of fixed shape can do what the eager pass does in recurrent layers.

        Chunks of prompts are folded into the states, and snapshots are kept of them. Passes that
        extend others are eager.
        """
        feeds = zip(batch.start, batch.feed, strict=True)
        return self.states is None or (first < 0 and not any(chunk_ends(start, len(feed)) for start, feed in feeds))

    def hold(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits [N, V] to memory that all passes share, since only one of them runs at a time."""
        held = self._logits
        if held is None or len(held) < len(logits) or held.dtype != logits.dtype:
            # Recordings of smaller passes keep the memory that they were made with.
            held = self._logits = torch.empty_like(logits)
        return held[: len(logits)].copy_(logits)

    def drop_logits(self) -> None:
        """Free the memory of `hold`. No pass that uses it may run afterwards."""
        self._logits = None

    def bytes(self) -> int:
        """Return the bytes of the memory of `hold`."""
        return 0 if self._logits is None else self._logits.nbytes

    def forward(self, tokens: torch.Tensor, stage: Stage, keep: torch.Tensor, run: FixedRun | None) -> torch.Tensor:
        """Return the logits [K, V] of the columns `keep` [K] of `tokens` [R, L]. `run` is that of recurrent layers."""
        ids = tokens.clamp(0, self._embeddings - 1).view(1, -1)
        with run.running(stage.positions.flatten()) if run else nullcontext():
            out = self.model(
                input_ids=ids,
                position_ids=stage.positions.reshape(1, -1),
                # With a mask, transformers does not try to detect packed sequences itself.
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                kv=stage,
                **({"logits_to_keep": keep} if self._selects_logits else {}),
            ).logits[0]
        return out if self._selects_logits else out[keep]  # type: ignore[no-any-return]


class Scored(NamedTuple):
    """What a scoring pass returns."""

    logits: torch.Tensor  # [R, L, V], by sequence and node
    best: torch.Tensor  # [R, L] likeliest ids
    node_states: dict[int, torch.Tensor]  # exported outputs [R, L, H]
    token_states: dict[int, torch.Tensor]  # the same of all tokens, by slot
    staged: StagedRows | None  # of recurrent layers


class Drafted(NamedTuple):
    """What a drafting pass returns."""

    tokens: torch.Tensor  # [R, steps] in batch order
    staged: StagedRows | None  # of recurrent layers


class StaticPass:
    """The pass of one bucket: buffers, and a function of them that does not synchronize with the host."""

    def __init__(self, model: StaticModel, bucket: Bucket) -> None:
        self.bucket = bucket
        self._model = model
        self._spare = model.cache.spare
        shape = (bucket.rows, bucket.columns)
        device = model.cache.device
        no_seqs = Batch(seqs=(), start=(), feed=(), budget=DraftBudget(()))
        self._integers = upload(round_integers(bucket, no_seqs, empty(0, device), -1, self._spare), device)
        self._draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._parents = torch.full(shape, -1, dtype=torch.int64, device=device)

    def bytes(self) -> int:
        """Return the bytes of the buffers."""
        return self._integers.nbytes + self._draft_tokens.nbytes + self._parents.nbytes

    def fill(self, batch: Batch, draft: Draft, first: int) -> None:
        """Copy the integers of a round to the device, in one copy, and its draft tokens from node `first` on."""
        integers = round_integers(self.bucket, batch, draft, first, self._spare)
        self._integers.copy_(upload(integers, self._integers.device), non_blocking=True)
        skip = max(first, 0)
        if count := min(draft.size - skip, self.bucket.columns):
            batch_size = len(draft.tokens)
            self._draft_tokens[:batch_size, :count] = draft.tokens[:, skip : skip + count]
            if self.bucket.trees:
                self._parents[:batch_size, :count] = draft.parent[:, :count]

    def score(self) -> Scored:
        """Run the pass."""
        source, entries, base, nodes, _, _ = self._parts()
        is_drafted = source < 0
        draft_index = (~source).clamp(min=0)
        tokens = torch.where(is_drafted, self._draft_tokens.flatten()[draft_index], source)
        stage = self._stage(entries)
        if self.bucket.trees:
            self._restrict_to_ancestors(stage, is_drafted, draft_index, base)
        run = self._begin_run(entries, is_drafted, draft_index)
        logits = self._model.hold(self._model.forward(tokens, stage, nodes.flatten(), run)).view(*nodes.shape, -1)
        best = logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), -1)
        outputs = self._model.outputs.items()
        node_states = {layer: out[0, nodes] for layer, out in outputs}
        token_states = {layer: out[0].view(*entries.shape, -1) for layer, out in outputs}
        return Scored(logits, best, node_states, token_states, run.staged() if run else None)

    def draft_greedy(self) -> Drafted:
        source, entries, base, _, budget, slots = self._parts()
        rows = torch.arange(len(slots), device=slots.device)
        vocab = self.bucket.vocab or None
        run = self._begin_run(entries, source < 0, source)
        last = self._feed_end(entries)
        logits = self._model.forward(source, self._stage(entries), rows * self.bucket.columns + last, run)
        tokens = [logits[:, :vocab].argmax(-1)]
        for step in range(1, self.bucket.steps):
            if run:
                run.add_tokens(last)
                last = torch.full_like(last, self.bucket.columns + step - 1)
            entries = (base + step - 1).masked_fill(budget <= step, self._spare)[:, None]
            logits = self._model.forward(tokens[-1][:, None], self._stage(entries), rows, run)
            tokens.append(logits[:, :vocab].argmax(-1))
        return Drafted(torch.stack(tokens, 1)[slots], run.staged() if run else None)

    def _begin_run(self, entries: torch.Tensor, is_drafted: torch.Tensor, draft_index: torch.Tensor) -> FixedRun | None:
        """Begin a run of the recurrent layers; None: there are none. The arguments are [R, L], as in `score`."""
        states = self._model.states
        if states is None:
            return None
        if not self.bucket.trees:
            rows, size = entries.shape
            return FixedRun(states, chain_rows(rows, size, entries.device))
        feed_end = self._feed_end(entries.masked_fill(is_drafted, self._spare))
        return FixedRun(states, tree_rows(is_drafted, draft_index, self._parents, feed_end))

    def _feed_end(self, entries: torch.Tensor) -> torch.Tensor:
        """Return [R]: the last token of each feed, from where the tokens of the feeds are written [R, L]."""
        return ((entries < self._spare).sum(1) - 1).clamp(min=0)

    def _parts(self) -> list[torch.Tensor]:
        """Return views of the integers, in the order of `round_integers`."""
        rows, size = self.bucket.rows, self.bucket.columns
        grid = rows * size
        parts = torch.split(self._integers, [grid, grid, rows, grid, rows, rows])
        return [part.view(rows, size) if i in (0, 1, 3) else part for i, part in enumerate(parts)]

    def _stage(self, entries: torch.Tensor) -> Stage:
        """Make the causal mask. Padding attends to everything, so that its values stay finite."""
        all_entries = torch.arange(self.bucket.length, device=entries.device)
        return Stage(
            entries=entries.clone() if self._model.compiled else entries,  # without the offset of a view
            positions=entries.masked_fill(entries == self._spare, 0),
            visible=all_entries <= entries[..., None],
            entry_positions=all_entries.expand(len(entries), -1),
            dtype=self._model.dtype,
            compiled=self._model.compiled,
            masks={},
        )

    def _restrict_to_ancestors(
        self, stage: Stage, is_drafted: torch.Tensor, draft_index: torch.Tensor, base: torch.Tensor
    ) -> None:
        """Restrict draft tokens to their ancestors, and set their positions from their depth.

        Args:
            stage: changed in place.
            is_drafted: [R, L] whether a token is a draft token.
            draft_index: [R, L] index of each draft token in the flat draft.
            base: [R] the entry of node 0 of each slot.
        """
        above = ancestors(self._parents)  # [R, N, N], N = L
        depth = above.sum(-1)
        num_nodes = above.shape[-1]
        drafted_positions = base[:, None] - 1 + depth.flatten()[draft_index]
        stage.positions = torch.where(is_drafted, drafted_positions, stage.positions)
        node = stage.entry_positions - base[:, None]  # [R, S] the node of each entry; negative: committed
        committed = node < 0
        node = node.clamp(0, num_nodes - 1)
        is_ancestor = above.flatten(0, 1)[draft_index].gather(2, node[:, None].expand(*draft_index.shape, -1))
        stage.visible = stage.visible & (~is_drafted[..., None] | committed[:, None] | is_ancestor)
        # The index in the batch of each slot. It is 0 for slots without draft tokens, whose result
        # is not used.
        seq_index = draft_index.amax(1) // num_nodes
        node_positions = base[:, None] - 1 + depth[seq_index].gather(1, node)
        stage.entry_positions = torch.where(committed, stage.entry_positions, node_positions)
