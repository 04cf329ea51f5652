"""A target that runs draft heads that fill in blocks and correct them by a recurrent state (Domino)."""

from __future__ import annotations

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.targets.base import at_depth, node_depths
from outrider.models.heads.targets.block import BlockTarget


class RecurrentBlockTarget(BlockTarget):
    """Runs a `BlockHead` with a recurrent correction.

    `score` corrects the logits of each node by the state after the tokens on its path. Nodes before
    `first` must have been scored in this round.
    """

    def __init__(self, module: BlockHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context)
        self._states = torch.empty(0)  # [B, 1 + nodes, S] after the last committed tokens and after each scored node

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        recurrence = self.module.recurrence
        if first < 0:
            self._run_blocks(batch)
        self._advance(draft, max(first, 0))
        depth = node_depths(draft, first)
        corrections = recurrence.corrections(at_depth(self._out, depth), self._states[:, 1 + first :], depth)
        return self._scores(at_depth(self._logits, depth) + corrections)

    def _begin(self, last: torch.Tensor, columns: torch.Tensor) -> None:
        super()._begin(last, columns)
        self._states = self.module.recurrence.advance(self.module.embed(self._last_tokens))

    def _advance(self, draft: Draft, first: int) -> None:
        """Compute the states after the nodes from `first` on."""
        known = self._states[:, : 1 + first]
        embeddings = self.module.embed(draft.tokens[:, first:])
        parents = (draft.parent[:, first:] + 1)[..., None].expand(-1, -1, known.shape[-1])
        states = torch.cat([known, known.new_zeros(*embeddings.shape[:2], known.shape[-1])], 1)
        for _ in range(_num_levels(draft, first)):
            states = torch.cat([known, self.module.recurrence.advance(embeddings, states.gather(1, parents))], 1)
        self._states = states


def _num_levels(draft: Draft, first: int) -> int:
    """Return the most nodes from `first` on that are on one path."""
    if draft.chain or draft.size <= first:
        return draft.size - first
    return int(tree.ancestors(draft.parent)[:, first:, first:].sum(-1).max())
