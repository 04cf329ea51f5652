"""Targets that run draft heads that fill in blocks on a GPU, with the choice of their tokens, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.core.types import Batch, SharedWeights
from outrider.errors import UnsupportedModel
from outrider.models.heads.description import BlockView
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.layers import Attention
from outrider.models.heads.targets.block import BlockTarget, without_last_tokens
from outrider.models.heads.targets.recorded import RecordedDrafts
from outrider.models.heads.targets.recurrent_block import RecurrentBlockTarget
from outrider.models.heads.targets.refined_block import RefinedBlockTarget
from outrider.models.triton.passes import MAX_COLUMNS, PADDING, Bucket, Buffers, Rows


class RecordedBlocks(RecordedDrafts, BlockTarget):
    """Runs a `BlockHead` with a paged KV cache. A pass is fed all new tokens, and the last one starts the block."""

    def __init__(self, module: BlockHead, tables: SharedWeights, **options: Any) -> None:
        self._more_entries = module.block.size
        if self._more_entries > MAX_COLUMNS:
            raise UnsupportedModel(f"the Triton kernels take blocks of at most {MAX_COLUMNS} tokens")
        super().__init__(module, tables, **options)
        self._bits = {view: torch.tensor(_bits(view, module.block.size), device=self.device) for view in self._views}

    def _most_fed(self, steps: int) -> int:
        return steps + 2  # besides as many as were drafted, the token after them and the one before

    def _columns(self, batch: Batch) -> Batch:
        return batch

    def _reserve(self, columns: Batch) -> None:
        self._pages.reserve(without_last_tokens(columns), (self.module.block.size,) * len(columns.seqs))

    def _run_blocks(self, batch: Batch) -> torch.Tensor:
        bucket = self._bucket(batch, self.max_draft_tokens)
        if bucket is None:  # a pass over a prompt
            bucket = Bucket(rows=len(batch.seqs), columns=max(map(len, batch.feed)), nodes=0)
            self._reserve(batch)
            buffers = Buffers(bucket, self._pages.reach, self.device, self._input_memory(bucket))
            self._fill(buffers, batch, batch)
            columns: torch.Tensor = self._score_fixed(buffers)
        else:
            columns = self._run_pass(replace(bucket, steps=0), batch)[: len(batch.seqs)].clone()
        self._begin(self._upload_last(batch), columns)
        return columns

    def _score_fixed(self, buffers: Buffers) -> Any:
        """Return the outputs [R, size, H] of all columns of the blocks."""
        self._write_states(buffers)
        rows = self._block_rows(buffers)
        groups = {
            view: [replace(rows, bits=rows.bits & bits.repeat(rows.rows, 1))] for view, bits in self._bits.items()
        }

        def attend(layer: Attention, *qkv: torch.Tensor) -> torch.Tensor:
            view = self._views[layer.layer_idx]
            return self._attend(layer.layer_idx, qkv, groups[view], view.window)

        return self.module(buffers.tokens()[buffers.last()], rows.position, attend)

    def _write_states(self, buffers: Buffers) -> None:
        """Write the keys and values of the states that are fed."""
        rows = buffers.layout()
        start = (buffers.base - 1).repeat_interleave(rows.columns)
        rows = replace(rows, entry=rows.entry.masked_fill(rows.entry == start, PADDING))  # the last token has no state
        fused = self._fused(buffers)
        for layer, pair in enumerate(self.module.keys_and_values(fused, rows.position)):
            self._write(layer, rows, pair)

    def _block_rows(self, buffers: Buffers) -> Rows:
        """Return a block after each sequence. All bits are set, or none in a row without a sequence."""
        size = self.module.block.size
        start = buffers.base - 1
        column = torch.arange(size, dtype=torch.int32, device=self.device)
        position = (start[:, None] + column).clamp(min=0)
        unused = (start < 0)[:, None]
        return Rows(
            rows=len(start),
            columns=size,
            entry=position.masked_fill(unused, PADDING).flatten(),
            position=position.flatten(),
            prefix=start.clamp(min=0),
            bits=torch.where(unused, 0, -1).expand(-1, size).reshape(-1, 1),
            table=buffers.table,
        )

    def _draft_chains(self, buffers: Buffers) -> torch.Tensor:
        columns = self._score_fixed(buffers)
        self._begin(self._last_of(buffers), columns)
        return self._choose_chain(buffers.bucket)

    def _last_of(self, buffers: Buffers) -> torch.Tensor:
        """Return what `_upload_last` does."""
        return buffers.tokens()[buffers.last()][:, None]

    def _choose_chain(self, bucket: Bucket) -> torch.Tensor:
        """Return the likeliest ids [R, draft tokens], one after the other if they depend on those before."""
        block = self.module.block
        if not (block.markov_rank or block.selector or block.recurrence):
            return self._choose(self._logits, bucket.vocab)
        tokens = [self._last_tokens[:, 0]]
        for depth in range(self.max_draft_tokens):
            tokens.append(self._choose(self._corrected(depth, tokens[-1]), bucket.vocab))
        return torch.stack(tokens[1:], 1)

    def _corrected(self, depth: int, before: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, Vd] of the draft token at a depth after the tokens `before` [R]."""
        return self.module.correct_logits(self._logits[:, depth], self._out[:, depth], before)


class RecordedRecurrentBlocks(RecordedBlocks, RecurrentBlockTarget):
    """Runs a `BlockHead` with a recurrent correction."""

    def _corrected(self, depth: int, before: torch.Tensor) -> torch.Tensor:
        recurrence = self.module.recurrence
        if depth:
            self._states = recurrence.advance(self.module.embed(before)[:, None], self._states)
        out = self._out[:, depth]
        index = torch.full((), depth, device=self.device)
        return self._logits[:, depth] + recurrence.corrections(out, self._states[:, 0], index)


class RecordedRefinedBlocks(RecordedBlocks, RefinedBlockTarget):
    """Runs a `BlockHead` with a causal refiner."""

    def _choose_chain(self, bucket: Bucket) -> torch.Tensor:
        return self._choose(self._all_logits(self._resolve(), self._rows), bucket.vocab)

    def _more_states(self, batch: Batch) -> list[Sequence[torch.Tensor]]:
        return [list(torch.split(self._upload_last(batch)[:, :-1], 1))]

    def _input_memory(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        known = self.module.block.first_column
        return (*super()._input_memory(bucket), torch.zeros(bucket.rows, known, dtype=torch.int64, device=self.device))

    def _last_of(self, buffers: Buffers) -> torch.Tensor:
        return torch.cat([buffers.states[1], super()._last_of(buffers)], 1)


def _bits(view: BlockView, size: int) -> list[list[int]]:
    """Return [size][1]: which columns of a block each column sees, as a signed word."""
    words = []
    for column in range(size):
        first = max(column - view.window + 1, 0) if view.window else 0
        end = column + 1 if view.causal else size
        word = (1 << end) - (1 << first)
        words.append([word - (1 << 64) if word >> 63 else word])
    return words
