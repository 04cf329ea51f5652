"""Targets that run autoregressive draft heads on a GPU, of one or several modules, and with mask tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from outrider.core.types import Batch, Draft, SharedWeights
from outrider.errors import UnsupportedModel
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.layers import Attention
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, skip_tokens
from outrider.models.heads.targets.base import node_depths
from outrider.models.heads.targets.masked import MaskedTarget
from outrider.models.heads.targets.multi_module import MultiModuleTarget
from outrider.models.heads.targets.recorded import RecordedDrafts, fill_rows
from outrider.models.triton.passes import MAX_COLUMNS, Bucket, Buffers, Rows
from outrider.models.triton.ragged import feeds_long_prompt, ragged_pass


class _Scored(NamedTuple):
    """The tensors that a pass of fixed shape returns."""

    fed_back: torch.Tensor  # [R * C, S]
    logits: torch.Tensor  # [R * C, Vd] float32, by node


class RecordedHead(RecordedDrafts, AutoregressiveTarget):
    """Runs an `AutoregressiveHead` with a paged KV cache. Passes of fixed shapes are recorded as graphs."""

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, **options: Any) -> None:
        self._window: int = options.get("window") or 0
        if 0 < self._window < MAX_COLUMNS:
            raise UnsupportedModel(f"the Triton kernels need windows of at least {MAX_COLUMNS} tokens")
        super().__init__(module, tables, **options)

    def _reserve(self, columns: Batch) -> None:
        self._pages.reserve(columns, [max(budget - 1, 0) for budget in columns.draft_budget])

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._pages.reserve(batch, draft.width)
        bucket = None if feeds_long_prompt(batch, first) else self.graphs.bucket(batch, draft, first)
        if bucket is None:
            return self._run_ragged(batch, draft, first, states)
        buffers, run = self.graphs.find(bucket)
        buffers.fill(batch, draft, first, self._pages)
        skip = max(first, 0)
        pairs = zip(batch.feed, draft.width, strict=True)
        counts = [len(feed) * (first < 0) + max(width - skip, 0) for feed, width in pairs]
        fill_rows(buffers.states[0], bucket.rows, [[part] for part in torch.split(states, counts)])
        scored: _Scored = run()
        # The results are copied, because the next pass writes to the same memory.
        rows = scored.fed_back.view(bucket.rows, bucket.columns, -1)
        fed_back = torch.cat([rows[b, :count] for b, count in enumerate(counts)])
        logits = scored.logits.view(bucket.rows, bucket.columns, -1)
        return fed_back, logits[: len(counts), : draft.size - skip + (first < 0)].clone()

    def _run_ragged(
        self, batch: Batch, draft: Draft, first: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ragged = ragged_pass(batch, draft, first, self._pages)
        positions = ragged.positions()

        def run(states: torch.Tensor, module: int) -> torch.Tensor:
            in_order = torch.empty_like(states).index_copy_(0, ragged.place, states)
            return self._forward(ragged.tokens, in_order, positions, ragged.groups, module)[ragged.place]

        fed_back, out = self._outputs(run, states, self._begins(ragged.spans, first))
        return fed_back, self._node_logits(ragged.per_node(out[ragged.keep]), lambda: node_depths(draft, first))

    def _score_fixed(self, buffers: Buffers) -> _Scored:
        rows = buffers.layout()
        begins = None if buffers.bucket.nodes else _begins(rows)
        fed_back, out = self._outputs(self._runner(buffers.tokens(), rows), buffers.states[0], begins)
        nodes = buffers.nodes.long()
        base = buffers.base.repeat_interleave(rows.columns)
        logits = self._node_logits(out[nodes], lambda: (rows.position[nodes] - base + 1).long())
        return _Scored(fed_back, logits)

    def _draft_chains(self, buffers: Buffers) -> Any:
        """Draft greedily."""
        bucket = buffers.bucket
        rows = buffers.layout()
        fed_back, out = self._outputs(self._runner(buffers.tokens(), rows), self._fused(buffers), _begins(rows))
        last = buffers.last()
        states = at_end = fed_back[last]
        tokens = [self._token(out[last], 0, bucket.vocab)]
        for step in range(1, bucket.steps):
            run = self._runner(tokens[-1], buffers.step(step))
            states, out = self._outputs(run, states, None, range(step, bucket.steps))
            tokens.append(self._token(out, step, bucket.vocab))
        return self._result(torch.stack(tokens, 1), at_end)

    def _result(self, tokens: torch.Tensor, states: torch.Tensor) -> Any:
        """Return what `_keep` takes, from tokens [R, steps] and the states [R, S] after the feeds."""
        return tokens

    def _token(self, out: torch.Tensor, depth: int, vocab: int) -> torch.Tensor:
        """Return the likeliest ids [R] below `vocab` after nodes at one depth, for their outputs [R, *]."""
        logits = self._node_logits(out, lambda: torch.full((len(out),), depth, device=self.device))
        return self._choose(logits, vocab)

    def _runner(self, tokens: torch.Tensor, rows: Rows) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Return the function that runs one module over the tokens of rows."""
        return lambda states, module: self._forward(tokens, states, rows.position, [rows], module)

    def _forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, groups: Sequence[Rows], module: int
    ) -> torch.Tensor:
        """Return the outputs [T, H] of one module."""
        own = [_later(rows, module) for rows in groups] if module else groups

        def attend(layer: Attention, *qkv: torch.Tensor) -> torch.Tensor:
            return self._attend(layer.layer_idx, qkv, own, self._window)

        return self.module(tokens, states, positions, attend, module)  # type: ignore[no-any-return]

    def _input_memory(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Return memory for the states of a pass: those of the target before fusion, or those that the module takes."""
        if bucket.steps:
            return super()._input_memory(bucket)
        return (self._zeros(bucket.rows * bucket.columns, self.description.modules * self.module.body.hidden),)


class RecordedModules(MultiModuleTarget, RecordedHead):
    """Runs an `AutoregressiveHead` of several modules. Entry e of the cache is entry e - m of module m."""

    def _more_states(self, batch: Batch) -> list[Sequence[torch.Tensor]]:
        return [[self._states_before(batch, b)[None] for b in range(len(batch.seqs))]]

    def _fused(self, buffers: Buffers) -> torch.Tensor:
        fused = super()._fused(buffers)
        before = buffers.states[1].repeat_interleave(buffers.bucket.columns, 0)
        return torch.cat([fused, before[:, fused.shape[1] :]], 1)

    def _result(self, tokens: torch.Tensor, states: torch.Tensor) -> Any:
        return tokens, states

    def _keep(self, batch: Batch, result: Any) -> torch.Tensor:
        tokens, states = result
        self._store_last_states(skip_tokens(batch), states[: len(batch.seqs)].clone())
        return tokens  # type: ignore[no-any-return]

    def _input_memory(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        states = super()._input_memory(bucket)
        return (*states, self._zeros(bucket.rows, self._width)) if bucket.steps else states


class RecordedMasked(MaskedTarget, RecordedHead):
    """Runs an `AutoregressiveHead` with mask tokens. The masks are fed after the tokens of a sequence."""

    def _most_fed(self, steps: int) -> int:
        return 2 * steps

    def _columns(self, batch: Batch) -> Batch:
        columns = skip_tokens(batch)
        most = self.max_draft_tokens
        feeds = zip(columns.feed, batch.draft_budget, strict=True)
        fed = tuple((*feed, *[self._masks.token] * (min(budget, most) - 1)) for feed, budget in feeds)
        return replace(columns, feed=fed)

    def _reserve(self, columns: Batch) -> None:
        self._pages.reserve(columns, (0,) * len(columns.seqs))

    def _run_masks(self, batch: Batch) -> torch.Tensor:
        bucket = self._bucket(batch, self.max_draft_tokens)
        if bucket is None:
            return super()._run_masks(batch)
        out: torch.Tensor = self._run_pass(replace(bucket, steps=0), batch)
        return self.module.logits(out[: len(batch.seqs)])

    def _score_fixed(self, buffers: Buffers) -> Any:
        """Return the outputs [R, draft tokens, H] that predict. The last one is repeated if there are fewer masks."""
        rows = buffers.layout()
        masks = (buffers.budget.long() - 1).clamp(0, self.max_draft_tokens - 1)  # [R]
        first = buffers.last() - masks  # [R] the last token of each feed
        column = torch.arange(len(rows.position), device=self.device)
        is_mask = column > first.repeat_interleave(rows.columns)
        states = torch.where(is_mask[:, None], self.module.mask_state(), self._fused(buffers))
        out = self._runner(buffers.tokens(), rows)(states, 0)
        place = torch.arange(self.max_draft_tokens, device=self.device)
        return out[first[:, None] + torch.minimum(place, masks[:, None])]

    def _draft_chains(self, buffers: Buffers) -> Any:
        return self._choose(self.module.logits(self._score_fixed(buffers)), buffers.bucket.vocab)

    def _input_memory(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        return RecordedDrafts._input_memory(self, bucket)


def _begins(rows: Rows) -> torch.Tensor:
    """Return the first column [R] of each row."""
    return torch.arange(0, rows.rows * rows.columns, rows.columns, device=rows.entry.device)


def _later(rows: Rows, count: int) -> Rows:
    """Return rows whose first `count` entries of a sequence do not exist."""
    entry = rows.entry - count
    return replace(rows, entry=entry, prefix=rows.prefix - count, bits=rows.bits.masked_fill(entry[:, None] < 0, 0))
