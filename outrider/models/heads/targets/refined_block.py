"""A target that runs draft heads that fill in blocks and refine them causally (XPress)."""

from __future__ import annotations

import torch

from outrider.core import devices, tree
from outrider.core.draft_chains import ChainBuilder
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.targets.base import at_depth
from outrider.models.heads.targets.block import BlockTarget


class RefinedBlockTarget(BlockTarget):
    """Runs a `BlockHead` with a causal refiner.

    `score` corrects the logits of each node by the tokens on its path. So the distribution from
    which a token is sampled is well defined, and sampled chains and trees are resolved from left to
    right. `draft_greedy` resolves greedy chains in a fixed number of passes over all columns.
    """

    def __init__(self, module: BlockHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        super().__init__(module, tables, slots=slots, context=context)
        assert module.block.refiner is not None
        self._refiner = module.block.refiner
        # These belong to the current round, like those of the base class.
        self._features = torch.empty(0)  # [B, size, rank] what the refiner computes without tokens
        self._known = torch.empty(0)  # [B, 1 or 2] committed tokens before the first draft token that columns read
        self._rows: torch.Tensor | None = None  # [B, draft tokens, C] candidates, as rows of `_logits`; None: all
        self._values = torch.empty(0)  # [B, draft tokens, C] their logits before the correction

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._run_blocks(batch)
        refiner = self.module.refiner
        known = self._known.shape[1]
        # The columns of known tokens come first, as a chain. The last one predicts the first draft token.
        chain = torch.arange(known, device=self.device).expand_as(self._known)
        depth = torch.cat([torch.zeros_like(self._known[:, :1]), tree.depths(draft)], 1)
        column = torch.cat([chain[:, :-1], depth + known - 1], 1).clamp(max=self.module.block.size - 1)
        visible = tree.ancestors(torch.cat([chain - 1, draft.parent + known], 1))
        features = self._features.gather(1, column[..., None].expand(-1, -1, self._refiner.rank))
        inputs = refiner.inputs(features, torch.cat([self._known, draft.tokens], 1))
        latents = refiner.mix_nodes(inputs, column, visible)[:, known + first :]
        depth = depth[:, 1 + first :]
        rows = None if self._rows is None else at_depth(self._rows, depth)
        values = at_depth(self._values, depth) + refiner.corrections(latents, rows)
        return self._scores(self._all_logits(values, rows))

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        self._run_blocks(batch)
        logits = self._scores(self._all_logits(self._resolve(), self._rows)).logits[..., :vocab]
        tokens = logits.argmax(-1)
        builder = ChainBuilder(batch.draft_budget, stop_rule if devices.is_cpu(self.device) else None)
        last = self.max_draft_tokens - 1
        while builder.depth < max(builder.count):
            depth = min(builder.depth, last)
            builder.process(logits[:, depth], tokens[:, depth], None)
        columns = torch.arange(builder.depth, device=self.device).clamp(max=last)
        return DraftChains(
            tokens=tokens[:, columns],
            count=tuple(builder.count),
            margin=builder.margins,
            accept_prob=builder.accept_probs,
        )

    def _upload_last(self, batch: Batch) -> torch.Tensor:
        last = super()._upload_last(batch)
        if not self.module.block.first_column:
            return last
        before = [_token_before_last(batch, b) for b in range(len(batch.seqs))]
        return torch.cat([tree.upload(before, self.device)[:, None], last], 1)

    def _begin(self, last: torch.Tensor, columns: torch.Tensor) -> None:
        super()._begin(last, columns)
        self._features = self.module.refiner.features(columns)
        self._known = last
        self._rows, self._values = None, self._logits
        if 0 < self._refiner.candidates < self._logits.shape[-1]:
            self._values, self._rows = self._logits.topk(self._refiner.candidates)

    def _resolve(self) -> torch.Tensor:
        """Return the logits [B, draft tokens, C] of candidates after all passes over the columns."""
        refiner = self.module.refiner
        values = self._values
        for _ in range(min(self._refiner.passes, self.max_draft_tokens)):
            best = values.argmax(-1, keepdim=True)
            chosen = self.module.ids[(best if self._rows is None else self._rows.gather(-1, best))[..., 0]]
            inputs = refiner.inputs(self._features, torch.cat([self._known, chosen[:, :-1]], 1))
            latents = refiner.mix_columns(inputs)[:, self.module.block.first_column :]
            values = self._values + refiner.corrections(latents, self._rows)
        return values

    def _all_logits(self, values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Return logits [B, M, Vd] from those of candidates [B, M, C]. Other tokens get -inf."""
        if rows is None:
            return values
        logits = values.new_full((*values.shape[:-1], self._logits.shape[-1]), -torch.inf)
        return logits.scatter(-1, rows, values)


def _token_before_last(batch: Batch, b: int) -> int:
    """Return the token before the last one of a feed, or the last one if there is no other."""
    feed, start = batch.feed[b], batch.start[b]
    if len(feed) > 1:
        return feed[-2]
    before = batch.seqs[b].token_ids[max(start - 1, 0) : start]  # a sequence that is measured has no such token
    return before[0] if before else feed[0]
