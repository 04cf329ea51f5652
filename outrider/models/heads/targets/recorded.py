"""A target that runs autoregressive draft heads on a GPU, a whole chain of draft tokens as one CUDA graph.

Linear layers and norms are those of the module. Attention and the KV cache are those of the Triton
kernels, so one recording serves sequences of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from outrider.core.target import draft_by_scores
from outrider.core.tree import empty
from outrider.core.types import Batch, Draft, DraftChains, SharedWeights, StopRule
from outrider.errors import UnsupportedModel
from outrider.models.cache.device_pages import DevicePagedCache
from outrider.models.heads.hidden_states import StateCache
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.layers import Attention
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, skip_tokens
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.triton.decoder import attend_groups
from outrider.models.triton.passes import MAX_COLUMNS, Bucket, Buffers, Rows
from outrider.models.triton.ragged import feeds_long_prompt, ragged_pass
from outrider.models.triton.recordings import Recordings


class _Scored(NamedTuple):
    """The tensors that a pass of fixed shape returns."""

    out: torch.Tensor  # [R * C, H]
    logits: torch.Tensor  # [R * C, Vd] float32, by node


class RecordedHead(AutoregressiveTarget):
    """Runs an `AutoregressiveHead` with a paged KV cache. Passes of fixed shapes are recorded as graphs."""

    def __init__(
        self,
        module: AutoregressiveHead,
        tables: SharedWeights,
        *,
        slots: int,
        context: int,
        window: int | None = None,
        record: Recorder | None = None,
    ) -> None:
        """Prepare as an `AutoregressiveTarget`. Without `record`, all passes run eagerly.

        Raises:
            UnsupportedModel: the window is too small for the kernels.
        """
        if window is not None and window < MAX_COLUMNS:
            raise UnsupportedModel(f"the Triton kernels need windows of at least {MAX_COLUMNS} tokens")
        super().__init__(module, tables, slots=slots, context=context, window=window)
        body = module.body
        self._window = window or 0
        self._memory = DevicePagedCache(
            slots=slots,
            capacity=context,
            layers=body.layers,
            heads=body.key_heads,
            dim=body.dim,
            dtype=self._dtype,
            device=self.device,
        )
        self.cache = StateCache(self._memory, self._hidden_states, to_head_batch=skip_tokens, skipped_tokens=1)
        self.kernels = "triton"
        self._record = record
        one = torch.ones(context + 1, 1, device=self.device)
        self._unrotated = (one, torch.zeros_like(one))  # the module rotates queries and keys
        self._reset()

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        head_batch = skip_tokens(batch)
        steps = max(batch.draft_budget)
        no_draft = empty(len(batch.seqs), self.device)
        find = partial(
            self.graphs.bucket, head_batch, no_draft, -1, steps=steps, vocab=vocab if vocab < self.vocab else 0
        )
        # The feed of a round is shorter where draft tokens were rejected. One recording serves all.
        bucket = find(least=steps + 1) or find()
        if bucket is None or feeds_long_prompt(head_batch, -1):
            return draft_by_scores(self, batch, vocab, stop_rule)
        self._memory.reserve(head_batch, [max(budget - 1, 0) for budget in batch.draft_budget])
        buffers, run = self.graphs.find(bucket)
        buffers.fill(head_batch, no_draft, -1, self._memory)
        spans = zip(head_batch.seqs, head_batch.start, head_batch.ends, strict=True)
        _fill(buffers, [self._hidden_states.parts(seq.slot, start, end) for seq, start, end in spans])
        tokens: torch.Tensor = run()
        return DraftChains(tokens=tokens[: len(batch.seqs), :steps].clone(), count=batch.draft_budget)

    def refresh_shared(self, tables: SharedWeights) -> None:
        super().refresh_shared(tables)
        self._reset()  # the recorded passes read the older tables

    def graph_bytes(self) -> int:
        """Bytes of recorded passes, besides weights and cache."""
        return self.graphs.bytes()

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._memory.reserve(batch, draft.width)
        bucket = None if feeds_long_prompt(batch, first) else self.graphs.bucket(batch, draft, first)
        if bucket is None:
            ragged = ragged_pass(batch, draft, first, self._memory)
            in_order = torch.empty_like(states).index_copy_(0, ragged.place, states)
            out = self._forward(ragged.tokens, in_order, ragged.positions(), ragged.groups)[ragged.place]
            return out, ragged.per_node(self.module.logits(out[ragged.keep]))
        buffers, run = self.graphs.find(bucket)
        buffers.fill(batch, draft, first, self._memory)
        skip = max(first, 0)
        pairs = zip(batch.feed, draft.width, strict=True)
        counts = [len(feed) * (first < 0) + max(width - skip, 0) for feed, width in pairs]
        _fill(buffers, [[part] for part in torch.split(states, counts)])
        scored: _Scored = run()
        # The results are copied, because the next pass writes to the same memory.
        rows = scored.out.view(bucket.rows, bucket.columns, -1)
        out = torch.cat([rows[b, :count] for b, count in enumerate(counts)])
        logits = scored.logits.view(bucket.rows, bucket.columns, -1)
        return out, logits[: len(counts), : draft.size - skip + (first < 0)].clone()

    def _function(self, buffers: Buffers) -> Callable[[], object]:
        """Return the function of a pass of fixed shape."""
        return partial(self._draft_chains if buffers.bucket.steps else self._score_fixed, buffers)

    def _score_fixed(self, buffers: Buffers) -> _Scored:
        assert buffers.states is not None
        rows = buffers.layout()
        out = self._forward(buffers.tokens(), buffers.states, rows.position, [rows])
        return _Scored(out, self.module.logits(out[buffers.nodes.long()]))

    def _draft_chains(self, buffers: Buffers) -> torch.Tensor:
        """Draft greedily and return the tokens [R, steps]."""
        assert buffers.states is not None
        bucket = buffers.bucket
        states = self.module.fuse_states(self._hidden_states.finish(buffers.states).to(self._dtype))
        rows = buffers.layout()
        out = self._forward(buffers.tokens(), states, rows.position, [rows])[buffers.last()]
        tokens = [self._choose(out, bucket.vocab)]
        for step in range(1, bucket.steps):
            rows = buffers.step(step)
            out = self._forward(tokens[-1], self.module.feed_back(out), rows.position, [rows])
            tokens.append(self._choose(out, bucket.vocab))
        return torch.stack(tokens, 1)

    def _choose(self, out: torch.Tensor, vocab: int) -> torch.Tensor:
        """Return the likeliest target ids [R] below `vocab`, or of all if it is 0, for outputs [R, H]."""
        logits = self.module.logits(out)
        if vocab:
            logits = logits.masked_fill(self.module.ids >= vocab, -torch.inf)
        return self.module.ids[logits.argmax(-1)]

    def _forward(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, groups: Sequence[Rows]
    ) -> torch.Tensor:
        """Return the outputs [T, H] of the module."""
        pages = self._memory.pages

        def attend(module: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            qkv = torch.cat([query, key, value]).transpose(0, 1).flatten(1)
            attended = attend_groups(
                qkv, groups, pages[:, module.layer_idx], self._unrotated, scale=module.dim**-0.5, window=self._window
            )
            return attended.view(len(qkv), -1, module.dim).transpose(0, 1)

        return self.module(tokens, states, positions, attend)  # type: ignore[no-any-return]

    def _states(self, bucket: Bucket) -> torch.Tensor:
        """Return memory for the states of a pass: those of the target before fusion, or those that the module takes."""
        description = self.description
        shape: tuple[int, ...] = (self.module.body.hidden,)
        if bucket.steps:
            shape = (len(description.aux_states.layers), description.target_hidden)
        return torch.zeros(bucket.rows * bucket.columns, *shape, dtype=self._dtype, device=self.device)

    def _reset(self) -> None:
        """Drop the recorded passes."""
        self.graphs = Recordings(self._memory, make=self._function, record=self._record, states=self._states)


def _fill(buffers: Buffers, parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy the states of each sequence to its row, in one call."""
    to = buffers.states
    assert to is not None
    rows, columns = buffers.bucket.rows, buffers.bucket.columns
    filler = to.new_zeros(columns, *to.shape[1:])
    pieces: list[torch.Tensor] = []
    for own in parts:
        pieces += own
        pieces.append(filler[sum(map(len, own)) :])
    pieces += [filler] * (rows - len(parts))
    torch.cat(pieces, out=to)
