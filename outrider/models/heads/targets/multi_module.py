"""A target that runs draft heads with several modules. Each module starts one token later than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from outrider.core import tree
from outrider.core.cache import Layout, UnboundedCache
from outrider.core.types import Batch, Draft, Round, Scores, SharedWeights
from outrider.models.cache.static import StaticCache
from outrider.models.heads.hidden_states import StateCache
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.targets.autoregressive import skip_tokens
from outrider.models.heads.targets.base import HeadRunner, cached_attention
from outrider.models.torch.attention import CacheReader


class MultiModuleTarget(HeadRunner):
    """Runs an `AutoregressiveHead` with several modules. Each module has its own KV cache.

    Module m, counted from 0, combines a token with the output of module m - 1 at the token before, and predicts the
    draft token at depth m. So a draft token runs only through the modules that predict after it. A sequence with fewer
    tokens than modules has no input for the last modules, so their predictions are arbitrary.
    """

    module: AutoregressiveHead

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        count = module.description.modules
        super().__init__(module, tables, slots=slots, context=context, max_draft_tokens=count)
        self._kv_caches = [StaticCache(slots=slots, capacity=context, device=self.device) for _ in range(count)]
        self.cache = StateCache(
            _ModuleCaches(self._kv_caches), self._hidden_states, to_head_batch=skip_tokens, skipped_tokens=1
        )
        self._zero_states = torch.zeros(count, module.description.width, dtype=self._dtype, device=self.device)
        # The outputs [modules, H] of all modules at the last committed tokens, by slot and position.
        self._last_states: dict[int, dict[int, torch.Tensor]] = {}
        # The same in the current round, by sequence and node. Node -1 is the last committed token.
        self._node_states: list[dict[int, torch.Tensor]] = []

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        return self._scores(self._run_feed(batch) if first < 0 else self._run_nodes(batch, draft, first))

    def _run_feed(self, batch: Batch) -> torch.Tensor:
        """Run the feed through all modules. Return the logits [B, 1, Vd] of the first module at the last tokens."""
        ends = batch.ends
        slots = [seq.slot for seq in batch.seqs]
        target_states = [
            self._hidden_states.read(slot, max(start, 1) - 1, end - 1)
            for slot, start, end in zip(slots, batch.start, ends, strict=True)
        ]
        fused = self.module.fuse_states(torch.cat(target_states).to(self._dtype))
        states = list(torch.split(fused, list(map(len, target_states))))
        self._node_states = [{-1: self._zero_states.clone()} for _ in slots]
        empty = tree.empty(len(slots), self.device)
        logits = torch.empty(0)
        for index in range(self.max_draft_tokens):
            out, _ = self._run_module(index, batch, empty, -1, torch.cat(states))
            sizes = list(map(len, states))
            if not index:
                last_columns = tree.upload([end - 1 for end in accumulate(sizes)], self.device)
                logits = self.module.logits(out[last_columns])[:, None]
            for b, new_states in enumerate(torch.split(self.module.feed_back(out, index), sizes)):
                if len(new_states):
                    self._node_states[b][-1][index] = new_states[-1]
                states[b] = new_states[:-1]
                # At the first new token the next module needs this module's output at the token before.
                if batch.start[b] > index + 1:
                    before = self._last_states[slots[b]].get(batch.start[b] - 1, self._zero_states)
                    states[b] = torch.cat([before[index, None], new_states[:-1]])
        self._store_last_states(slots, batch.start, ends)
        return logits

    def _store_last_states(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Store the outputs at the last tokens, and drop those that no later feed needs."""
        for slot, start, end, node_states in zip(slots, starts, ends, self._node_states, strict=True):
            stored = self._last_states.get(slot, {}) if start else {}
            needed = {position: states for position, states in stored.items() if position >= start - 1}
            self._last_states[slot] = needed | {end - 1: node_states[-1]}

    def _run_nodes(self, batch: Batch, draft: Draft, first: int) -> torch.Tensor:
        """Return the logits [B, M, Vd] of the nodes from `first` on."""
        chain_parents = [list(range(-1, draft.size - 1))] * len(batch.seqs)
        parents = chain_parents if draft.chain else draft.parent.tolist()
        nodes = [(b, node) for b, width in enumerate(draft.width) for node in range(first, width)]
        depths = [min(len(tree.path(parents[b], node)), self.max_draft_tokens - 1) for b, node in nodes]
        node_depth = tree.upload(depths, self.device)
        logits = torch.empty(0)
        for b, node in nodes:
            self._node_states[b][node] = self._zero_states.clone()
        for index in range(min(depths), self.max_draft_tokens):
            states = torch.stack([self._node_states[b][parents[b][node]][index - 1] for b, node in nodes])
            out, layout = self._run_module(index, batch, draft, first, states)
            for (b, node), state in zip(nodes, self.module.feed_back(out, index), strict=True):
                self._node_states[b][node][index] = state
            module_logits = self.module.logits(out, index)
            if len(logits):
                logits = torch.where((node_depth == index)[:, None], module_logits, logits)
            else:
                logits = module_logits
        return layout.per_node(logits)

    def _run_module(
        self, index: int, batch: Batch, draft: Draft, first: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, Layout]:
        """Run one module. Return the outputs [T, H] of all columns and their layout."""
        kv_cache = self._kv_caches[index]
        layout = kv_cache.stage(skip_tokens(batch, index + 1), draft, first)
        if not len(states):
            return states, layout
        attention = cached_attention(CacheReader(kv_cache, layout))
        return self.module(layout.tokens, states, layout.positions + index, attention, index), layout


class _ModuleCaches(UnboundedCache):
    """The KV caches of all modules as one cache. Its length is that of the first module."""

    def __init__(self, caches: Sequence[StaticCache]) -> None:
        self._caches = caches

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        return max(cache.admit(slot, tokens) for cache in self._caches)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        raise NotImplementedError("each module stages its own columns")

    def commit(self, round: Round) -> None:
        for index, cache in enumerate(self._caches):
            cache.commit(replace(round, batch=skip_tokens(round.batch, index)))

    def release(self, slot: int) -> None:
        for cache in self._caches:
            cache.release(slot)

    def length(self, slot: int) -> int:
        return self._caches[0].length(slot)

    def bytes(self) -> int:
        return sum(cache.bytes() for cache in self._caches)
