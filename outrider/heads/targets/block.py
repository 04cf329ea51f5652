"""A draft that fills in blocks, as a target: one pass at the text's end, and answers from what it said."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.heads.hidden_states import StateCache
from outrider.heads.modules.block import BlockHead
from outrider.heads.targets.base import HeadRunner, at_depth, looking
from outrider.models.attention import CacheReader


class BlockTarget(HeadRunner):
    """A `BlockHead` over the keys and values that it has made of the target's states.

    `score` at the text's end runs one block a row; with `first` it looks up what that said of the nodes' depths, and
    corrects it by their tokens. Guesses further behind than the block reaches are answered as its last one.
    """

    module: BlockHead

    def __init__(self, module: BlockHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context, reach=module.block.draft_tokens)
        self._memory = StaticCache(slots=slots, capacity=context + module.block.size, device=self.device)
        self.cache = StateCache(self._memory, self._taps, read=tapped)
        # Of this round: the texts' last tokens [B, 1], and of their blocks outputs [B, guesses, H] and logits before
        # they are corrected [B, guesses, Vd].
        self._last, self._out, self._said = (torch.empty(0) for _ in range(3))

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._read(batch)
        depth = torch.cat([torch.zeros_like(self._last), tree.depths(draft)], 1)[:, 1 + first :]
        before = torch.cat([self._last, draft.tokens], 1)[:, 1 + first :]
        scores = self._scores(self.module.corrected(at_depth(self._said, depth), before))
        if not self.module.block.confidence:
            return scores
        # It comes from a node and its ancestors, never from the guess that is drawn there, so it may decide who stops.
        return replace(scores, confidence=self.module.confidence(at_depth(self._out, depth), before))

    def _read(self, batch: Batch) -> None:
        """Make keys and values of the states that are new, and run a block behind each text."""
        known, size = tapped(batch), self.module.block.size
        self._remember(known)
        self._last = tree.upload([feed[-1:] for feed in batch.feed], self.device)
        columns = tree.chain(self._last.expand(-1, size), (size,) * len(batch.seqs))
        layout = self._memory.stage(known, columns, 0)
        reader = CacheReader(self._memory, layout)
        _let_see_both_ways(reader, self.module.body.heads // self.module.body.key_heads, self._dtype)
        self._out = self.module(self._last[:, 0], layout.positions, looking(reader))
        self._said = self.module.logits(self._out)

    def _remember(self, known: Batch) -> None:
        layout = self._memory.stage(known, tree.empty(len(known.seqs), self.device))
        states = [
            self._taps.read(row.slot, start, start + len(feed))
            for row, start, feed in zip(known.seqs, known.start, known.feed, strict=True)
        ]
        fused = self.module.fused(torch.cat(states).to(self._dtype))
        for layer, (keys, values) in enumerate(self.module.shown(fused, layout.positions)):
            self._memory.write(layer, layout, keys, values)


def tapped(batch: Batch) -> Batch:
    """The same batch without the last token of each feed, whose state the target has yet to show."""
    return replace(batch, feed=tuple(feed[:-1] for feed in batch.feed))


def _let_see_both_ways(reader: CacheReader, sharing: int, dtype: torch.dtype) -> None:
    """Give a pass over blocks its masks: each column sees all that its row has kept, and all of its block."""
    masks: list[torch.Tensor | None] = []
    for group in reader.groups:
        ends = [span.start + span.end - span.begin for span in group]
        if min(ends) == max(ends):
            masks.append(None)
            continue
        device = reader.layout.positions.device
        beyond = torch.arange(max(ends), device=device) >= tree.upload(ends, device)[:, None]
        added = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
        masks.append(added[:, None, None])
    reader.masks[None, sharing, dtype] = masks
