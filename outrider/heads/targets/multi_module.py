"""A draft with several modules, as a target: each of them follows the text one token further behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from outrider.cache.base import Layout, UnboundedCache
from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.core.types import Batch, Draft, Round, Scores, SharedWeights
from outrider.heads.hidden_states import StateCache
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.targets.autoregressive import behind
from outrider.heads.targets.base import HeadRunner, looking
from outrider.models.attention import CacheReader


class MultiModuleTarget(HeadRunner):
    """A `AutoregressiveHead` with several modules, each over a cache of its own.

    Module m, counted from 0, reads a token beside what module m - 1 made of the token before, and guesses what comes m
    tokens later than the first one's guess. So a guess is read by those modules alone that guess behind it. Of a text
    with fewer tokens than modules nothing is known to the last of them, whose guesses are then as good as any.
    """

    module: AutoregressiveHead

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        count = module.description.modules
        super().__init__(module, tables, slots=slots, context=context, reach=count)
        self._memories = [StaticCache(slots=slots, capacity=context, device=self.device) for _ in range(count)]
        self.cache = StateCache(_Caches(self._memories), self._taps, read=behind, before=1)
        self._nothing = torch.zeros(count, module.description.width, dtype=self._dtype, device=self.device)
        # What the modules made [modules, H] of a token, to go on from: by slot and place, of texts' last tokens; and in
        # this round by row and node, where -1 is the text's last token.
        self._ends: dict[int, dict[int, torch.Tensor]] = {}
        self._made: list[dict[int, torch.Tensor]] = []

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        return self._scores(self._read(batch) if first < 0 else self._guess(batch, draft, first))

    def _read(self, batch: Batch) -> torch.Tensor:
        """Logits [B, 1, Vd] behind the texts, all of whose new tokens all modules read."""
        ends = [start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True)]
        slots = [row.slot for row in batch.seqs]
        starts = [max(start, 1) for start in batch.start]
        taps = [self._taps.read(*place) for place in zip(slots, _less(starts), _less(ends), strict=True)]
        states = list(torch.split(self.module.fused(torch.cat(taps).to(self._dtype)), [len(each) for each in taps]))
        self._made = [{-1: self._nothing.clone()} for _ in slots]
        logits = torch.empty(0)
        for number in range(self.max_draft_tokens):
            out, _ = self._run(number, batch, tree.empty(len(slots), self.device), -1, torch.cat(states))
            sizes = [len(each) for each in states]
            if not number:
                last = tree.upload([end - 1 for end in accumulate(sizes)], self.device)
                logits = self.module.logits(out[last])[:, None]
            for b, made in enumerate(torch.split(self.module.recycled(out, number), sizes)):
                if len(made):
                    self._made[b][-1][number] = made[-1]
                states[b] = made[:-1]
                if batch.start[b] > number + 1:  # what this module made of the token before
                    before = self._ends[slots[b]].get(batch.start[b] - 1, self._nothing)
                    states[b] = torch.cat([before[number, None], made[:-1]])
        for slot, start, end, made_of in zip(slots, batch.start, ends, self._made, strict=True):
            kept = self._ends.get(slot, {}) if start else {}
            self._ends[slot] = {at: made for at, made in kept.items() if at >= start - 1} | {end - 1: made_of[-1]}
        return logits

    def _guess(self, batch: Batch, draft: Draft, first: int) -> torch.Tensor:
        """Logits [B, M, Vd] behind the nodes from `first` on."""
        one_by_one = [list(range(-1, draft.size - 1))] * len(batch.seqs)
        parents = one_by_one if draft.chain else draft.parent.tolist()
        nodes = [(b, node) for b, width in enumerate(draft.width) for node in range(first, width)]
        depths = [min(len(tree.path(parents[b], node)), self.max_draft_tokens - 1) for b, node in nodes]
        depth, logits = tree.upload(depths, self.device), torch.empty(0)
        for b, node in nodes:
            self._made[b][node] = self._nothing.clone()
        for number in range(min(depths), self.max_draft_tokens):
            states = torch.stack([self._made[b][parents[b][node]][number - 1] for b, node in nodes])
            out, layout = self._run(number, batch, draft, first, states)
            for (b, node), made in zip(nodes, self.module.recycled(out, number), strict=True):
                self._made[b][node][number] = made
            said = self.module.logits(out, number)
            logits = torch.where((depth == number)[:, None], said, logits) if len(logits) else said
        return layout.per_node(logits)

    def _run(
        self, number: int, batch: Batch, draft: Draft, first: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, Layout]:
        """One module's outputs [T, H] of all columns, and how these lie."""
        memory = self._memories[number]
        layout = memory.stage(behind(batch, number + 1), draft, first)
        if not len(states):
            return states, layout
        look = looking(CacheReader(memory, layout))
        return self.module(layout.tokens, states, layout.positions + number, look, number), layout


class _Caches(UnboundedCache):
    """The modules' caches, as one to those who keep texts in them: the first one's."""

    def __init__(self, inner: Sequence[StaticCache]) -> None:
        self._inner = inner

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        return max(each.admit(slot, tokens) for each in self._inner)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        raise NotImplementedError("each module stages its own columns")

    def commit(self, round: Round) -> None:
        for number, each in enumerate(self._inner):
            each.commit(replace(round, batch=behind(round.batch, number)))

    def release(self, slot: int) -> None:
        for each in self._inner:
            each.release(slot)

    def length(self, slot: int) -> int:
        return self._inner[0].length(slot)

    def bytes(self) -> int:
        return sum(each.bytes() for each in self._inner)


def _less(places: Sequence[int]) -> list[int]:
    return [place - 1 for place in places]
