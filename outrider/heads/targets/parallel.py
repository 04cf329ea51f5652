"""Heads that read one state of the target, as a target: Medusa's and Hydra's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.heads.hidden_states import NoCache
from outrider.heads.modules.parallel import ParallelHead
from outrider.heads.targets.base import HeadRunner


class ParallelTarget(HeadRunner):
    """A stack of `ParallelHead` heads on the state before the last token."""

    module: ParallelHead

    def __init__(self, module: ParallelHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context, reach=module.stack.heads)
        self.cache = NoCache(self._taps)
        self._state, self._last = torch.empty(0), torch.empty(0)  # [B, H], [B, 1] of this round

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            ends = [start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True)]
            taps = [self._taps.read(row.slot, end - 2, end - 1) for row, end in zip(batch.seqs, ends, strict=True)]
            self._state = torch.cat(taps)[:, -1].to(self._dtype)
            self._last = tree.upload([feed[-1:] for feed in batch.feed], self.device)
            logits = self.module(self._state, self._last, 0)[:, None]
        else:
            logits = torch.stack([self._after(draft, node) for node in range(first, draft.size)], 1)
        return self._scores(logits)

    def _after(self, draft: Draft, node: int) -> torch.Tensor:
        """Logits [B, Vd] behind a node, or anything where its row has no such node."""
        paths = [tree.path(parents, node) for parents in draft.parent.tolist()]
        depth = min(max(map(len, paths)), self.max_draft_tokens - 1)
        if any(len(path) != len(paths[0]) for path in paths):
            return torch.stack([self._row(draft, b, path) for b, path in enumerate(paths)])
        index = tree.upload([path[:depth] for path in paths], self.device)
        return self.module(self._state, torch.cat([self._last, draft.tokens.gather(1, index)], 1), depth)  # type: ignore[no-any-return]

    def _row(self, draft: Draft, b: int, path: Sequence[int]) -> torch.Tensor:
        depth = min(len(path), self.max_draft_tokens - 1)
        tokens = torch.cat([self._last[b], draft.tokens[b, list(path[:depth])]])
        return self.module(self._state[b], tokens, depth)  # type: ignore[no-any-return]
