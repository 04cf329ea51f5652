"""A pass of fixed shape, so that it can be recorded once and replayed.

Everything that changes between rounds (token ids, write positions, lengths, tree structure) is in buffers. The pass is
a function of the buffers and the cache. Sequence r is in slot r. Padding writes to a spare entry at the end of each
slot, which is never read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.cache.static import StaticCache
from outrider.core.tree import ancestors, empty, upload
from outrider.core.types import Batch, Draft
from outrider.errors import UnsupportedModel
from outrider.models.attention import Fixed, MaskRule


class SpareCache(StaticCache):
    """A static cache with one more entry per slot, for padding."""

    def __init__(self, *, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(slots=slots, capacity=capacity + 1, device=device)
        self.spare = capacity

    def reserve(self, batch: Batch, guesses: Sequence[int], skip: int = -1) -> None:
        """Reserve entries as `stage` does, without making a layout."""
        self._set_sequences(batch)
        for row, start, feed, count in zip(batch.seqs, batch.start, batch.feed, guesses, strict=True):
            if skip < 0 or count > skip:
                stop = start + len(feed) + count
                assert stop <= self.spare, "slot overflow"
                self._clear(row.slot, stop)

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


def plan(bucket: Bucket, batch: Batch, draft: Draft, first: int, spare: int) -> list[int]:
    """Return the integers of one round, with the layout of `Cache.stage`, ordered by slot.

    In order: for each token its id, or ~i for draft token i of the flat draft [R * L] in batch order; the entry where
    each token is written; for each slot the entry of node 0; for each node in batch order its token; for each slot its
    budget; and for each sequence of the batch its slot.
    """
    rows, size, skip, fed = bucket.rows, bucket.columns, max(first, 0), first < 0
    source, place, keep = [0] * (rows * size), [spare] * (rows * size), [0] * (rows * size)
    base, budget, order = [0] * rows, [0] * rows, [0] * rows
    for b, row in enumerate(batch.seqs):
        begin, feed = row.slot * size, batch.feed[b] if fed else ()
        guesses = max(draft.width[b] - skip, 0)
        end = begin + len(feed) + guesses
        base[row.slot] = batch.start[b] + len(batch.feed[b])
        start = batch.start[b] if fed else base[row.slot] + skip
        source[begin:end] = [*feed, *(~(b * size + j) for j in range(guesses))]
        place[begin:end] = range(start, start + end - begin)
        wanted = [*range(end - guesses - fed, end)] or [begin]
        keep[b * size : (b + 1) * size] = wanted + wanted[:1] * (size - len(wanted))  # padding repeats the first node
        budget[row.slot], order[b] = batch.draft_budget[b], row.slot
    return source + place + base + keep + budget + order


@dataclass(slots=True, kw_only=True, eq=False)
class Stage:
    """What the wrapped layers need in one pass of fixed shape."""

    place: torch.Tensor  # [R, L]
    positions: torch.Tensor  # [R, L]
    seen: torch.Tensor  # [R, L, S] bool, by position and tree
    where: torch.Tensor  # [R, S] the position of each entry
    dtype: torch.dtype
    compiled: bool
    masks: dict[tuple[MaskRule | None, int], torch.Tensor]

    def mask(self, sight: MaskRule | None, sharing: int) -> torch.Tensor:
        """Return `Fixed.mask`. It is made once for all layers with the same rule."""
        if (sight, sharing) not in self.masks:
            seen = self.seen
            if sight is not None and sight.reach is not None and seen.shape[-1] > sight.reach:
                row = torch.zeros((), dtype=torch.int64, device=seen.device)
                seen = seen & sight.rule(row, row, self.positions[..., None], self.where[:, None])
            added = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self.masks[sight, sharing] = added.repeat(1, sharing, 1)[:, None]
        return self.masks[sight, sharing]


class _Layer:
    """The `forward` of a decoder layer. In passes of fixed shape it gives the layer its part of the cache.

    A compiled layer receives only tensors, so equal layers share one compilation.
    """

    def __init__(self, layer: Any, cache: SpareCache) -> None:
        inner = [module for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        if len({module.layer_idx for module in inner}) != 1:
            raise UnsupportedModel("its layers do not say which they are")
        self._sharing = max(getattr(module, "num_key_value_groups", 1) for module in inner)
        self.index: int = inner[0].layer_idx
        self._cache, self._plain = cache, layer.forward
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = kwargs.get("kv")
        if not isinstance(stage, Stage):
            return self._plain(*args, **kwargs)
        sights = {arg for arg in (*args, *kwargs.values()) if isinstance(arg, MaskRule)}
        stripes = self._cache.of(self.index)
        if len(sights) > 1 or stripes is None:
            raise UnsupportedModel("its layers see in several ways at once")
        mask = stage.mask(sights.pop() if sights else None, self._sharing)
        if stage.compiled:
            torch._dynamo.maybe_mark_dynamic(mask, 3)  # one compilation for all lengths
        kv = Fixed(keys=stripes[0], values=stripes[1], place=stage.place, mask=mask)
        rest = {name: None if isinstance(arg, MaskRule) else arg for name, arg in kwargs.items()}
        return self._run(stage)(*(None if isinstance(arg, MaskRule) else arg for arg in args), **{**rest, "kv": kv})

    def _run(self, stage: Stage) -> Callable[..., Any]:
        if not stage.compiled:
            return self._plain  # type: ignore[no-any-return]
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, fullgraph=True, dynamic=False)
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
        wrapped = [_Layer(layer, cache) for layer in layers]
        self.layers = tuple(wrapper.index for wrapper in wrapped)
        if len(set(self.layers)) < len(wrapped):
            raise UnsupportedModel("its layers do not say which they are")
        for layer, wrapper in zip(layers, wrapped, strict=True):
            layer.forward = wrapper
        self.model, self.cache, self.outputs = model, cache, outputs
        self.compiled = False  # whether passes use the compiled layers
        self.dtype: torch.dtype = model.get_output_embeddings().weight.dtype
        self._embeddings: int = model.get_input_embeddings().num_embeddings
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def ready(self) -> bool:
        """Return whether the cache is allocated."""
        return all(self.cache.of(layer) is not None for layer in self.layers)

    def forward(self, tokens: torch.Tensor, stage: Stage, keep: torch.Tensor) -> torch.Tensor:
        """Return the logits [K, V] of the columns `keep` [K] of `tokens` [R, L]."""
        ids = tokens.clamp(0, self._embeddings - 1).view(1, -1)
        out = self.model(
            input_ids=ids,
            position_ids=stage.positions.reshape(1, -1),
            attention_mask=torch.ones_like(ids),  # keeps transformers from detecting packed sequences itself
            use_cache=False,
            kv=stage,
            **({"logits_to_keep": keep} if self._keeps else {}),
        ).logits[0]
        return out if self._keeps else out[keep]  # type: ignore[no-any-return]


class StaticPass:
    """The pass of one bucket: buffers, and a function of them that does not synchronize with the host."""

    def __init__(self, model: StaticModel, bucket: Bucket) -> None:
        self.bucket, self._model, self._spare = bucket, model, model.cache.spare
        shape, device = (bucket.rows, bucket.columns), model.cache.device
        nobody = Batch(seqs=(), start=(), feed=(), draft_budget=())
        self._numbers = upload(plan(bucket, nobody, empty(0, device), -1, self._spare), device)
        self._guesses = torch.zeros(shape, dtype=torch.int64, device=device)
        self._parents = torch.full(shape, -1, dtype=torch.int64, device=device)

    def bytes(self) -> int:
        return self._numbers.nbytes + self._guesses.nbytes + self._parents.nbytes

    def fill(self, batch: Batch, draft: Draft, first: int) -> None:
        """Copy the integers of a round to the device, in one copy, and its draft tokens from node `first` on."""
        numbers = plan(self.bucket, batch, draft, first, self._spare)
        self._numbers.copy_(upload(numbers, self._numbers.device), non_blocking=True)
        if guesses := min(draft.size - max(first, 0), self.bucket.columns):
            rows, skip = len(draft.tokens), max(first, 0)
            self._guesses[:rows, :guesses] = draft.tokens[:, skip : skip + guesses]
            if self.bucket.trees:
                self._parents[:rows, :guesses] = draft.parent[:, :guesses]

    def score(self) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the pass.

        Returns:
            Logits [R, L, V], likeliest ids [R, L] and exported outputs [R, L, H], by sequence and node; and the
            exported outputs of all tokens, by slot.
        """
        source, place, base, keep, _, _ = self._parts()
        guess, node = source < 0, (~source).clamp(min=0)
        tokens = torch.where(guess, self._guesses.flatten()[node], source)
        stage = self._stage(place)
        if self.bucket.trees:
            self._branch(stage, guess, node, base)
        logits = self._model.forward(tokens, stage, keep.flatten()).view(*keep.shape, -1)
        best = logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), -1)
        outputs = self._model.outputs.items()
        whole = {layer: out[0].view(*place.shape, -1) for layer, out in outputs}
        return logits, best, {layer: out[0, keep] for layer, out in outputs}, whole

    def grow(self) -> torch.Tensor:
        """Draft greedily and return the tokens [R, steps] in batch order."""
        source, place, base, _, budget, order = self._parts()
        slots, most = torch.arange(len(order), device=order.device), self.bucket.vocab or None
        last = slots * self.bucket.columns + ((place < self._spare).sum(1) - 1).clamp(min=0)
        logits = self._model.forward(source, self._stage(place), last)
        tokens = [logits[:, :most].argmax(-1)]
        for step in range(1, self.bucket.steps):
            place = (base + step - 1).masked_fill(budget <= step, self._spare)[:, None]
            logits = self._model.forward(tokens[-1][:, None], self._stage(place), slots)
            tokens.append(logits[:, :most].argmax(-1))
        return torch.stack(tokens, 1)[order]

    def _parts(self) -> list[torch.Tensor]:
        rows, size = self.bucket.rows, self.bucket.columns
        grid = rows * size
        parts = torch.split(self._numbers, [grid, grid, rows, grid, rows, rows])
        return [part.view(rows, size) if i in (0, 1, 3) else part for i, part in enumerate(parts)]

    def _stage(self, place: torch.Tensor) -> Stage:
        """Make the causal mask. Padding sees everything, so that its values stay finite."""
        entries = torch.arange(self.bucket.length, device=place.device)
        return Stage(
            place=place,
            positions=place.masked_fill(place == self._spare, 0),
            seen=entries <= place[..., None],
            where=entries.expand(len(place), -1),
            dtype=self._model.dtype,
            compiled=self._model.compiled,
            masks={},
        )

    def _branch(self, stage: Stage, guess: torch.Tensor, node: torch.Tensor, base: torch.Tensor) -> None:
        """Restrict draft tokens to their ancestors, and set their positions from their depth."""
        above = ancestors(self._parents)  # [R, N, N], N = L
        depth, nodes = above.sum(-1), above.shape[-1]
        stage.positions = torch.where(guess, base[:, None] - 1 + depth.flatten()[node], stage.positions)
        behind = stage.where - base[:, None]  # [R, S]: the node of each entry
        index = behind.clamp(0, nodes - 1)
        related = above.flatten(0, 1)[node].gather(2, index[:, None].expand(*node.shape, -1))
        stage.seen = stage.seen & (~guess[..., None] | (behind < 0)[:, None] | related)
        owner = node.amax(1) // nodes  # index in the batch; 0 for slots without draft tokens, whose result is not used
        stage.where = torch.where(behind < 0, stage.where, base[:, None] - 1 + depth[owner].gather(1, index))
