"""A draft that guesses behind masks, as a target: one pass over what is new of the text and the masks behind it."""

from __future__ import annotations

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.targets.autoregressive import AutoregressiveTarget, NativeHead, behind
from outrider.heads.targets.base import at_depth
from outrider.models.base import draft_by_scores


class MaskedTarget(AutoregressiveTarget):
    """A `AutoregressiveHead` with masks, over its own cache.

    `score` at the text's end runs as many masks as a row's budget asks for; with `first` it looks up what they said.
    A guess knows how many stand before it and not which, so all nodes of one depth are answered alike.
    """

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context)
        assert module.description.masks is not None
        self._masks = module.description.masks
        self.max_draft_tokens = self._masks.draft_tokens
        self._said = torch.empty(0)  # [B, 1 + masks, Vd] of this round

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._said = self._read(batch)
        root = torch.zeros(len(batch.seqs), 1, dtype=torch.int64, device=self.device)
        depth = torch.cat([root, tree.depths(draft)], 1)[:, 1 + first :]
        return self._scores(at_depth(self._said, depth))

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def _read(self, batch: Batch) -> torch.Tensor:
        """Logits [B, 1 + masks, Vd] behind each text and behind its masks."""
        widths = tuple(max(min(budget, self.max_draft_tokens) - 1, 0) for budget in batch.draft_budget)
        tokens = torch.full((len(widths), max(widths)), self._masks.token, device=self.device)
        none, mask = tree.empty(len(widths), self.device), self.module.masked()
        states = []
        for b, width in enumerate(widths):
            states += [self._before(batch, none, -1, b), mask.expand(width, -1)]
        return self._run(behind(batch), tree.chain(tokens, widths), -1, torch.cat(states))[1]


class NativeMaskedTarget(MaskedTarget, NativeHead):
    """The same on the native kernels; it is no `ChainSampler`, whose chains are a follower's."""
