"""A target that runs draft heads that fill in blocks. It runs one pass per round and answers later calls from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.models.cache.static import StaticCache
from outrider.models.heads.description import BlockView
from outrider.models.heads.hidden_states import StateCache
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.layers import Attention, AttentionFunction
from outrider.models.heads.targets.base import HeadRunner, at_depth, cached_attention, node_depths
from outrider.models.torch.attention import CacheReader, MaskRule


class BlockTarget(HeadRunner):
    """Runs a `BlockHead` with a KV cache that it computes from the target's hidden states.

    `score` with `first` < 0 runs one block per sequence. With `first` >= 0 it looks up the logits at the depth of each
    node and corrects them by the tokens of the nodes. Beyond the block it repeats the last logits.
    """

    module: BlockHead
    cache: StateCache

    def __init__(self, module: BlockHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context, max_draft_tokens=module.block.draft_tokens)
        self._kv_cache = StaticCache(slots=slots, capacity=context + module.block.size, device=self.device)
        self.cache = StateCache(self._kv_cache, self.hidden_states, to_head_batch=without_last_tokens)
        self._views = module.block.views or (BlockView(),) * module.body.layers
        self._rules = {view: _mask_rule(view) for view in self._views}
        # These belong to the current round.
        self._last_tokens = torch.empty(0)  # [B, 1] last committed tokens
        self._out = torch.empty(0)  # [B, draft tokens, H] outputs
        self._logits = torch.empty(0)  # [B, draft tokens, Vd] before the correction

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._run_blocks(batch)
        depth = node_depths(draft, first)
        before = torch.cat([self._last_tokens, draft.tokens], 1)[:, 1 + first :]
        out = at_depth(self._out, depth)
        scores = self._scores(self.module.correct_logits(at_depth(self._logits, depth), out, before))
        if not self.module.block.confidence:
            return scores
        # The confidence depends on a node and its ancestors, but not on the token that is sampled
        # after the node. So it may decide when a sequence stops drafting.
        return replace(scores, confidence=self.module.confidence(out, before))

    def _run_blocks(self, batch: Batch) -> torch.Tensor:
        """Cache the keys and values of new hidden states, and run one block after each sequence.

        Returns:
            The outputs [B, size, H] of all columns.
        """
        head_batch = without_last_tokens(batch)
        size = self.module.block.size
        self._write_cache(head_batch)
        last = self._upload_last(batch)
        # The cache needs only the positions of the columns. Their tokens are not used.
        blocks = tree.chain(last[:, -1:].expand(-1, size), (size,) * len(batch.seqs))
        layout = self._kv_cache.stage(head_batch, blocks, 0)
        attend = self._attention(CacheReader(self._kv_cache, layout))
        columns: torch.Tensor = self.module(last[:, -1], layout.positions, attend)
        self._begin(last, columns)
        return columns

    def _upload_last(self, batch: Batch) -> torch.Tensor:
        """Return the committed tokens [B, known] that later columns read. The last one starts the block."""
        return tree.upload([feed[-1:] for feed in batch.feed], self.device)

    def _begin(self, last: torch.Tensor, columns: torch.Tensor) -> None:
        """Keep what later calls of this round need: tokens of `_upload_last`, and outputs [B, size, H] of blocks."""
        self._last_tokens = last[:, -1:]
        self._out = self.module.predicting(columns)
        self._logits = self.module.logits(self._out)

    def _attention(self, reader: CacheReader) -> AttentionFunction:
        """Return a function that lets the columns of blocks attend to what the view of each layer shows."""
        sharing = self.module.body.heads // self.module.body.key_heads
        for view, rule in self._rules.items():
            if not view.causal:
                masks = list(_bidirectional_masks(reader, view.window, sharing, self._dtype))
                reader.masks[rule, sharing, self._dtype, None] = masks
        by_view = {view: cached_attention(reader, rule) for view, rule in self._rules.items()}

        def attend(module: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return by_view[self._views[module.layer_idx]](module, query, key, value)

        return attend

    def _write_cache(self, batch: Batch) -> None:
        """Write the keys and values of the batch's hidden states."""
        layout = self._kv_cache.stage(batch, tree.empty(len(batch.seqs), self.device))
        states = [
            self.hidden_states.read(seq.slot, start, start + len(feed))
            for seq, start, feed in zip(batch.seqs, batch.start, batch.feed, strict=True)
        ]
        fused = self.module.fuse_states(torch.cat(states).to(self._dtype))
        for layer, (keys, values) in enumerate(self.module.keys_and_values(fused, layout.positions)):
            self._kv_cache.write(layer, layout, keys, values)


def without_last_tokens(batch: Batch) -> Batch:
    """Return the batch without the last token of each feed, whose hidden state is not known yet."""
    return replace(batch, feed=tuple(feed[:-1] for feed in batch.feed))


def _mask_rule(view: BlockView) -> MaskRule:
    """Return a mask rule of its own for a view. Its masks are causal unless others are set for it."""
    window = view.window
    return MaskRule(lambda _seq, _head, query, key: key > query - window, window or None)


def _bidirectional_masks(
    reader: CacheReader, window: int, sharing: int, dtype: torch.dtype
) -> Iterator[torch.Tensor | None]:
    """Yield masks with which each column attends to the committed tokens of its sequence and to its whole block.

    With a window, it does not attend to the tokens that are `window` or more positions before it.
    `sharing` is the number of query heads per key head.
    """
    device = reader.layout.positions.device
    for group in reader.groups:
        size = group[0].end - group[0].begin
        ends = [span.start + size for span in group]
        is_windowed = 0 < window < max(ends)
        if min(ends) == max(ends) and not is_windowed:
            yield None
            continue
        entries = torch.arange(max(ends), device=device)
        end = tree.upload(ends, device)[:, None, None]
        hidden = entries >= end  # [R, 1, S]
        if is_windowed:
            columns = end - size + torch.arange(size, device=device)[:, None]
            hidden = (hidden | (entries <= columns - window)).repeat(1, sharing, 1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        yield mask[:, None]
