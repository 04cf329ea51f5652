"""A draft that follows the target's states, as a target: on torch, and on the native kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch

from outrider.cache.paged import PagedCache
from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule, UniformDraws
from outrider.errors import OutriderError
from outrider.heads.hidden_states import StateCache
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.targets.base import HeadRunner, looking
from outrider.heads.targets.native import HeadDecoder
from outrider.models.attention import CacheReader
from outrider.native.library import load_library
from outrider.native.target import columns_of


class AutoregressiveTarget(HeadRunner):
    """A `AutoregressiveHead` over its own cache."""

    module: AutoregressiveHead

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context, reach=context)
        self._memory = StaticCache(slots=slots, capacity=context, device=self.device)
        self.cache = StateCache(self._memory, self._taps, read=behind, before=1)
        self._states: list[dict[int, torch.Tensor]] = []  # by row and node, the state behind it; -1: the text's end

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        ours = behind(batch)
        states = torch.cat([self._before(batch, draft, first, b) for b in range(len(batch.seqs))])
        out, logits = self._run(ours, draft, first, states)
        self._remember(self.module.recycled(out), ours, draft, first)
        return self._scores(logits)

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, H] of all columns, and logits [B, M, Vd] of the nodes asked for."""
        layout = self._memory.stage(batch, draft, first)
        out = self.module(layout.tokens, states, layout.positions, looking(CacheReader(self._memory, layout)))
        return out, layout.per_node(self.module.logits(out[layout.keep]))

    def _before(self, batch: Batch, draft: Draft, first: int, b: int) -> torch.Tensor:
        """The states [L, H] before row b's columns."""
        slot, end = batch.seqs[b].slot, batch.start[b] + len(batch.feed[b])
        if first < 0:
            assert not draft.width[b], "the text is read before guesses are"
            return self._behind_text(slot, max(batch.start[b], 1) - 1, end - 1)
        known = self._states[b]
        nodes = range(first, draft.width[b])
        above = [node - 1 for node in nodes] if draft.chain else draft.parent[b].tolist()[first : draft.width[b]]
        return torch.stack([known[parent] for parent in above]) if above else known[-1].new_empty(0, len(known[-1]))

    def _behind_text(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """States [end - begin, H] of the target, as the module reads them."""
        return self.module.fused(self._taps.read(slot, begin, end).to(self._dtype))

    def _remember(self, states: torch.Tensor, batch: Batch, draft: Draft, first: int) -> None:
        """Keep what stands behind the text's end, or behind each new node, for the nodes below."""
        if first < 0:
            ends = accumulate(map(len, batch.feed))
            self._states = [{-1: states[end - 1]} for end in ends]
            return
        column = 0
        for known, width in zip(self._states, draft.width, strict=True):
            for node in range(first, width):
                known[node] = states[column]
                column += 1


class NativeHead(AutoregressiveTarget):
    """The same with its passes on the native kernels."""

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        """Prepare for `slots` rows of up to `context` tokens.

        Raises:
            UnsupportedModel: the kernels cannot run it.
        """
        super().__init__(module, tables, slots=slots, context=context)
        body = module.body
        sizes = {"layers": body.layers, "heads": body.key_heads, "dim": body.dim}
        self._blocks = PagedCache(slots=slots, capacity=context, dtype=tables.embedding.dtype, **sizes)
        self.cache = StateCache(self._blocks, self._taps, read=behind, before=1)
        self._decoder = HeadDecoder(module, tables, load_library(), self._blocks)
        self.kernels = "native"

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise OutriderError("a trained draft in native kernels cannot be swapped; load it with kernels torch")

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._blocks.reserve(batch, draft.width)
        columns, order = columns_of(batch, draft, first, self.vocab)
        logits, _, out = self._decoder.run(columns, (self.module.body.layers - 1,), states.float().contiguous())
        logits = logits if order is None else logits[order]
        return out[0].to(self._dtype), logits.view(len(batch.seqs), -1, logits.shape[-1])


class NativeAutoregressiveTarget(NativeHead):
    """The same, with a chain in one call: each guess goes on from the one before and from what was recycled.

    The kernels make states of what was tapped, too; for a few columns, calls of torch take longer than the guesses.
    """

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self._grow(batch, vocab, stop_rule, None)

    def draft_sampled(
        self, batch: Batch, vocab: int, draws: UniformDraws, stop_rule: StopRule | None = None
    ) -> DraftChains:
        return self._grow(batch, vocab, stop_rule, draws)

    def _grow(self, batch: Batch, vocab: int, stop_rule: StopRule | None, draws: UniformDraws | None) -> DraftChains:
        ours, none = behind(batch), tree.empty(len(batch.seqs), self.device)
        taps = torch.cat([self._before(batch, none, -1, b) for b in range(len(batch.seqs))])
        self._blocks.reserve(ours, batch.draft_budget)
        columns, _ = columns_of(ours, none, -1, self.vocab)
        return self._decoder.grow(
            columns, batch.draft_budget, vocab, stop_rule, draws=draws, state=taps.float().contiguous()
        )

    def _behind_text(self, slot: int, begin: int, end: int) -> torch.Tensor:
        return self._taps.tapped(slot, begin, end)


def behind(batch: Batch, tokens: int = 1) -> Batch:
    """The same batch without the first `tokens` of each text, for which there are no states."""
    start = tuple(max(start - tokens, 0) for start in batch.start)
    feed = tuple(feed[max(tokens - start, 0) :] for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(batch, start=start, feed=feed)
