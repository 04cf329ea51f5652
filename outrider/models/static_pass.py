"""A pass whose shapes are fixed by a bucket, so that it can be recorded once and replayed.

Everything that changes from round to round (ids, where to write, how far to see, who descends from whom) lies in
buffers, and the pass is a function of the buffers and the cache alone: it runs the same on any device. Row r is slot r,
so that stripes are read where they lie. What is padding writes to a spare entry behind each stripe, which nobody reads.
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
    """A static cache with one more entry behind each stripe, for padding."""

    def __init__(self, *, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(slots=slots, capacity=capacity + 1, device=device)
        self.spare = capacity

    def reserve(self, batch: Batch, guesses: Sequence[int], skip: int = -1) -> None:
        """Make room as `stage` does, for a pass that finds its own places."""
        self._set_sequences(batch)
        for row, start, feed, count in zip(batch.seqs, batch.start, batch.feed, guesses, strict=True):
            if skip < 0 or count > skip:
                stop = start + len(feed) + count
                assert stop <= self.spare, "slot overflow"
                self._clear(row.slot, stop)

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Whole stripes of a layer; None until it has been written."""
        return (self._keys[layer], self._values[layer]) if layer in self._keys else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is fixed."""

    rows: int  # slots 0 to rows - 1, whoever of them takes part
    columns: int  # of each row
    length: int  # entries of each slot that are read
    trees: bool = False
    steps: int = 0  # greedy guesses that are grown; 0 = the pass scores
    vocab: int = 0  # ids below which they are; 0 = all


def plan(bucket: Bucket, batch: Batch, draft: Draft, first: int, spare: int) -> list[int]:
    """One round's numbers, laid out as `Cache.stage` does it, each row in its slot's place.

    Of each column, by slot: the id that it feeds, or ~i for guess i of the flat guesses [R * L] in the batch's order;
    and where in its slot it is written. Of each slot: where node 0 is written. Of each node, by row of the batch: its
    column. Of each slot the budget; and of each row of the batch its slot.
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
        keep[b * size : (b + 1) * size] = wanted + wanted[:1] * (size - len(wanted))  # padding repeats the first
        budget[row.slot], order[b] = batch.draft_budget[b], row.slot
    return source + place + base + keep + budget + order


@dataclass(slots=True, kw_only=True, eq=False)
class Stage:
    """One forward over fixed shapes, as the wrapped layers are told of it."""

    place: torch.Tensor  # [R, L]
    positions: torch.Tensor  # [R, L]
    seen: torch.Tensor  # [R, L, S] bool: by the order of the text and of the tree
    where: torch.Tensor  # [R, S] the position of each entry
    dtype: torch.dtype
    compiled: bool
    masks: dict[tuple[MaskRule | None, int], torch.Tensor]

    def mask(self, sight: MaskRule | None, sharing: int) -> torch.Tensor:
        """As `Fixed.mask`; made once for all layers that see as far."""
        if (sight, sharing) not in self.masks:
            seen = self.seen
            if sight is not None and sight.reach is not None and seen.shape[-1] > sight.reach:
                row = torch.zeros((), dtype=torch.int64, device=seen.device)
                seen = seen & sight.rule(row, row, self.positions[..., None], self.where[:, None])
            added = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self.masks[sight, sharing] = added.repeat(1, sharing, 1)[:, None]
        return self.masks[sight, sharing]


class _Layer:
    """A decoder layer's `forward`, which hands the layer its own stripes where the shapes are fixed.

    What a compiled layer sees are tensors alone, so that one compilation serves all layers that are alike.
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
    """A model whose layers take passes of fixed shapes beside those that they took before."""

    def __init__(
        self, model: Any, layers: Sequence[Any], cache: SpareCache, outputs: Mapping[int, torch.Tensor]
    ) -> None:
        """Wrap the decoder `layers` of `model`; `outputs` fills with what is exported when a pass runs.

        Raises:
            UnsupportedModel: its layers cannot be told apart.
        """
        wrapped = [_Layer(layer, cache) for layer in layers]
        self.layers = tuple(wrapper.index for wrapper in wrapped)
        if len(set(self.layers)) < len(wrapped):
            raise UnsupportedModel("its layers do not say which they are")
        for layer, wrapper in zip(layers, wrapped, strict=True):
            layer.forward = wrapper
        self.model, self.cache, self.outputs = model, cache, outputs
        self.compiled = False  # whether passes run the compiled layers
        self.dtype: torch.dtype = model.get_output_embeddings().weight.dtype
        self._embeddings: int = model.get_input_embeddings().num_embeddings
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def ready(self) -> bool:
        """Whether the cache has been written, and so has its memory."""
        return all(self.cache.of(layer) is not None for layer in self.layers)

    def forward(self, tokens: torch.Tensor, stage: Stage, keep: torch.Tensor) -> torch.Tensor:
        """Logits [K, V] of the columns `keep` [K] of `tokens` [R, L]."""
        ids = tokens.clamp(0, self._embeddings - 1).view(1, -1)
        out = self.model(
            input_ids=ids,
            position_ids=stage.positions.reshape(1, -1),
            attention_mask=torch.ones_like(ids),  # or transformers finds packed texts by itself
            use_cache=False,
            kv=stage,
            **({"logits_to_keep": keep} if self._keeps else {}),
        ).logits[0]
        return out if self._keeps else out[keep]  # type: ignore[no-any-return]


class StaticPass:
    """One bucket's pass: buffers that are filled, and a function of them that never asks the host for anything."""

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
        """Take a round's numbers, in one copy from the host, and its guesses from node `first` on."""
        numbers = plan(self.bucket, batch, draft, first, self._spare)
        self._numbers.copy_(upload(numbers, self._numbers.device), non_blocking=True)
        if guesses := min(draft.size - max(first, 0), self.bucket.columns):
            rows, skip = len(draft.tokens), max(first, 0)
            self._guesses[:rows, :guesses] = draft.tokens[:, skip : skip + guesses]
            if self.bucket.trees:
                self._parents[:rows, :guesses] = draft.parent[:, :guesses]

    def score(self) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What a pass says, by row of the batch and node, and what it exports besides.

        Returns:
            logits [R, L, V], the likeliest ids as `Scores.best`, exported outputs alike [R, L, H], and these once more
            of every column, by slot.
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
        """[R, steps]: each row's greedy guesses, by row of the batch."""
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
        """Each column sees what stands before it; padding sees all, so that its numbers are numbers."""
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
        """Let guesses see, among guesses, their ancestors alone; and put guesses where their depth says."""
        above = ancestors(self._parents)  # [R, N, N], N = L
        depth, nodes = above.sum(-1), above.shape[-1]
        stage.positions = torch.where(guess, base[:, None] - 1 + depth.flatten()[node], stage.positions)
        behind = stage.where - base[:, None]  # [R, S]: which node an entry holds
        index = behind.clamp(0, nodes - 1)
        related = above.flatten(0, 1)[node].gather(2, index[:, None].expand(*node.shape, -1))
        stage.seen = stage.seen & (~guess[..., None] | (behind < 0)[:, None] | related)
        owner = node.amax(1) // nodes  # the row of the batch; 0 where the row has no guesses, which nobody sees
        stage.where = torch.where(behind < 0, stage.where, base[:, None] - 1 + depth[owner].gather(1, index))
