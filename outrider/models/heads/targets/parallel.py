"""A target that runs draft heads that predict from one hidden state of the target: Medusa and Hydra."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.models.heads.hidden_states import NoCache
from outrider.models.heads.modules.parallel import ParallelHead
from outrider.models.heads.targets.base import HeadRunner


class ParallelTarget(HeadRunner):
    """Runs a `ParallelHead` on the hidden state before the last committed token."""

    module: ParallelHead

    def __init__(self, module: ParallelHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context, max_draft_tokens=module.stack.heads)
        self.cache = NoCache(self.hidden_states)
        # These belong to the current round.
        self._state = torch.empty(0)  # [B, H]
        self._last_tokens = torch.empty(0)  # [B, 1]

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            ends = batch.ends
            states = [
                self.hidden_states.read(seq.slot, end - 2, end - 1) for seq, end in zip(batch.seqs, ends, strict=True)
            ]
            self._state = torch.cat(states)[:, -1].to(self._dtype)
            self._last_tokens = tree.upload([feed[-1:] for feed in batch.feed], self.device)
            logits = self.module(self._state, self._last_tokens, 0)[:, None]
        else:
            logits = torch.stack([self._node_logits(draft, node) for node in range(first, draft.size)], 1)
        return self._scores(logits)

    def _node_logits(self, draft: Draft, node: int) -> torch.Tensor:
        """Return the logits [B, Vd] after a node. They are arbitrary for sequences without this node."""
        paths = [tree.path(parents, node) for parents in draft.parent.tolist()]
        depth = min(max(map(len, paths)), self.max_draft_tokens - 1)
        if any(len(path) != len(paths[0]) for path in paths):
            return torch.stack([self._path_logits(draft, b, path) for b, path in enumerate(paths)])
        index = tree.upload([path[:depth] for path in paths], self.device)
        tokens = torch.cat([self._last_tokens, draft.tokens.gather(1, index)], 1)
        return self.module(self._state, tokens, depth)  # type: ignore[no-any-return]

    def _path_logits(self, draft: Draft, b: int, path: Sequence[int]) -> torch.Tensor:
        """Return the logits [Vd] after a path of sequence b."""
        depth = min(len(path), self.max_draft_tokens - 1)
        tokens = torch.cat([self._last_tokens[b], draft.tokens[b, list(path[:depth])]])
        return self.module(self._state[b], tokens, depth)  # type: ignore[no-any-return]
