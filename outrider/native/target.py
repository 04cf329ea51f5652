"""The target, and the draft, whose pass is one call into the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate

import torch

from outrider.cache.base import MIN_CAPACITY, Cache
from outrider.cache.paged import PagedCache
from outrider.cache.shared import SharedCache
from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftChains, KVView, Packed, Scores, SharedWeights, StopRule, UniformDraws
from outrider.errors import OutriderError
from outrider.models.checkpoint import Checkpoint
from outrider.models.submodel import refuse_wider
from outrider.native.abi import Columns
from outrider.native.decoder import Decoder
from outrider.native.library import load_library
from outrider.native.scores import Exported, NativeScores


class NativeTarget:
    """A Llama-like model on the CPU.

    What is computed for a token does not depend, in any bit, on what else is in the pass: the same text comes out
    with any proposer, any number of guesses and any company, in float32 and in bfloat16.
    """

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int, bits: int = 16) -> None:
        """Prepare for `slots` rows of up to `context` tokens; with `bits` below 16 the checkpoint is quantised.

        Raises:
            UnsupportedModel: the kernels cannot be compiled here, or do not know this model.
        """
        self._library = load_library()
        held = bits if bits < 16 else 8 * checkpoint.dtype.itemsize
        self._decoder = Decoder(checkpoint.model, self._library, bits=held)
        if bits < 16:  # from here on the quantised model is the model
            checkpoint.model.load_state_dict(self._decoder.quantised(), strict=False)
        self.vocab, self.device, self.version = checkpoint.vocab, checkpoint.device, 0
        self.slots, self.context = slots, context
        self._layers: tuple[int, ...] = ()
        self._config = checkpoint.model.config.to_dict()
        self.kernels = "native" if bits == 16 else f"native int{bits}"
        self.layers = self._decoder.shape.layers
        self._remember(self.layers)

    @property
    def compile_seconds(self) -> float:
        """What the kernels took to compile; 0 where an earlier run left them."""
        return self._library.compile_seconds

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self._memory.reserve(batch, draft.width)
        columns, order = columns_of(batch, draft, first, self.vocab)
        logits, likeliest, features = self._decoder.run(columns, self._layers)
        rows = len(batch.seqs)
        packed = exported = None
        if order is not None:
            likeliest = array("i", [likeliest[at] for at in order])
            packed = Packed(values=logits, at=torch.tensor(order).view(rows, -1))
        if self._layers:
            wanted = torch.tensor(columns.keep, dtype=torch.int64)
            at = (wanted if packed is None else wanted[packed.at]).view(rows, -1)
            feed = tuple(len(feed) if first < 0 else 0 for feed in batch.feed)
            columns_a_row = (fed + max(width - max(first, 0), 0) for fed, width in zip(feed, draft.width, strict=True))
            begin = tuple(accumulate(columns_a_row, initial=0))[:-1]
            exported = Exported(layers=self._layers, values=features, nodes=at, begin=begin, feed=feed)
        nodes = len(likeliest) // rows
        host = [likeliest[at : at + nodes].tolist() for at in range(0, len(likeliest), nodes)]
        return NativeScores(host=host, logits=logits, packed=packed, exported=exported)

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self._grow(batch, vocab, stop_rule, None)

    def draft_sampled(
        self, batch: Batch, vocab: int, draws: UniformDraws, stop_rule: StopRule | None = None
    ) -> DraftChains:
        return self._grow(batch, vocab, stop_rule, draws)

    def _grow(self, batch: Batch, vocab: int, stop_rule: StopRule | None, draws: UniformDraws | None) -> DraftChains:
        self._memory.reserve(batch, batch.draft_budget)
        columns, _ = columns_of(batch, tree.empty(len(batch.seqs), self.device), -1, self.vocab)
        return self._decoder.grow(columns, batch.draft_budget, vocab, stop_rule, draws=draws)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        most = self._decoder.shape.layers - 1
        if odd := [layer for layer in layers if not 0 <= layer <= most]:
            raise OutriderError(f"layer {odd[0]} was asked for; this target's layers are 0 to {most}")
        self._layers = tuple(layers)
        if layers:
            self.cache.set_prefix_caching(False)  # or the outputs at tokens that are cached already would be missing

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._decoder.load(weights)
        self.version = version

    def bytes(self) -> int:
        return self._decoder.bytes()

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        return self._decoder.read_bytes()

    def share_weights(self) -> SharedWeights:
        return replace(self._decoder.tables(), kv_view=KVView(entries=self._memory.entries, layer_config=self._config))

    def make_submodel(self, layers: Sequence[int]) -> NativeTarget:
        other = copy(self)
        other._decoder, other._layers, count = self._decoder.make_submodel(layers), (), len(layers)
        other.kernels = f"{self.kernels}, {count} layers"
        if tuple(layers) == tuple(range(count)):
            other.cache = SharedCache(self.cache)
            other._decoder.attach(self._memory)
        else:
            other._remember(count)
        return other

    def make_requantized(self, bits: int) -> NativeTarget:
        refuse_wider(bits, self._decoder.bits)
        other = copy(self)
        other._decoder, other._layers, other.kernels = self._decoder.make_requantized(bits), (), f"native int{bits}"
        other._remember(self.layers)
        return other

    def _remember(self, layers: int) -> None:
        """Take a cache for so many layers."""
        shape, capacity = self._decoder.shape, max(self.context, MIN_CAPACITY)
        sizes = {"layers": layers, "heads": shape.key_heads, "dim": shape.dim}
        self._memory = PagedCache(slots=self.slots, capacity=capacity, dtype=self._decoder.dtype, **sizes)
        self.cache: Cache = self._memory
        self._decoder.attach(self._memory)


def columns_of(batch: Batch, draft: Draft, first: int, vocab: int) -> tuple[Columns, list[int] | None]:
    """The columns of a pass, and where in what is kept each row's nodes lie; None where that is the order itself."""
    columns, skip = Columns(), max(first, 0)
    begins = []  # of each row in what is kept
    tokens = draft.host_tokens()
    parents = draft.parent.tolist() if draft.size and not draft.chain else None
    for b, row in enumerate(batch.seqs):
        begins.append(len(columns.keep))
        start, feed, width = batch.start[b], batch.feed[b], draft.width[b]
        if first < 0:
            columns.text(_embedded(feed, vocab), start, row.slot)
            columns.keep.append(len(columns.token) - 1)
        if width <= skip:
            continue
        guesses, base = _embedded(tokens[b][:width], vocab), start + len(feed)
        columns.keep.extend(range(len(columns.token), len(columns.token) + width - skip))
        if parents is None:
            columns.text(guesses[skip:], base + skip, row.slot)
        else:
            _branches(columns, guesses, parents[b], base, slot=row.slot, skip=skip)
    wanted = draft.size - skip + (first < 0)
    if len(columns.keep) == wanted * len(begins):
        return columns, None
    ends = (*begins[1:], len(columns.keep))
    order: list[int] = []
    for begin, end in zip(begins, ends, strict=True):
        order += [*range(begin, end), *[begin if end > begin else 0] * (wanted - (end - begin))]
    return columns, order


def _embedded(tokens: Sequence[int], vocab: int) -> Sequence[int]:
    """Ids that the embedding has; a text may hold others, where its own model's embedding is padded further."""
    if min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab:
        return tokens
    return [min(max(token, 0), vocab - 1) for token in tokens]


def _branches(
    columns: Columns, tokens: Sequence[int], parents: Sequence[int], base: int, *, slot: int, skip: int
) -> None:
    """A row's tree of guesses behind the `base` entries of its text, from guess `skip` on."""
    paths: list[list[int]] = []  # entries of each node's ancestors and itself
    for node, token in enumerate(tokens):
        above = parents[node]
        paths.append([*(paths[above] if above >= 0 else ()), base + node])
        if node >= skip:
            depth = base + len(paths[node]) - 1
            columns.add(token, depth, slot=slot, place=base + node, seen=base, tail=paths[node])
