"""A target that runs draft heads with mask tokens (P-EAGLE). One pass over the feed and the masks drafts all tokens."""

from __future__ import annotations

import torch

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, NativeHead, skip_tokens
from outrider.models.heads.targets.base import at_depth, node_depths


class MaskedTarget(AutoregressiveTarget):
    """Runs an `AutoregressiveHead` with mask tokens and its own KV cache, on torch.

    `score` with `first` < 0 runs as many mask tokens as the draft budget of each sequence needs.
    With `first` >= 0 it looks up their logits. A draft token depends on the number of draft tokens
    before it but not on their ids, so all nodes at one depth have the same logits.
    """

    def _prepare(self) -> None:
        assert self.module.description.masks is not None
        self._masks = self.module.description.masks
        self.max_draft_tokens = self._masks.draft_tokens
        self._logits = torch.empty(0)  # [B, 1 + masks, Vd] of the current round

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._logits = self._run_masks(batch)
        return self._scores(at_depth(self._logits, node_depths(draft, first)))

    def _run_masks(self, batch: Batch) -> torch.Tensor:
        """Return the logits [B, 1 + masks, Vd] after each sequence and after its mask tokens."""
        num_masks = tuple(max(min(budget, self.max_draft_tokens) - 1, 0) for budget in batch.draft_budget)
        tokens = torch.full((len(num_masks), max(num_masks)), self._masks.token, device=self.device)
        mask_state = self.module.mask_state()
        states = []
        for b, count in enumerate(num_masks):
            states.append(self._input_states(batch, b))
            states.append(mask_state.expand(count, -1))
        return self._run(skip_tokens(batch), tree.chain(tokens, num_masks), -1, torch.cat(states))[1]


class NativeMaskedTarget(MaskedTarget, NativeHead):
    """Runs an `AutoregressiveHead` with mask tokens on the native kernels.

    It does not implement `ChainSampler`, because the kernels draft chains token by token.
    """
