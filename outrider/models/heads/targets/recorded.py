"""Targets that run draft heads on a GPU, a whole chain of draft tokens as one CUDA graph.

`RecordedDrafts` is the part that all kinds of heads share. Linear layers and norms are those of the module. Attention
and the KV cache are those of the Triton kernels, so one recording serves sequences of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from outrider.core.tree import empty
from outrider.core.types import Batch, DraftChains, SharedWeights, StopRule
from outrider.models.cache.device_pages import DevicePagedCache
from outrider.models.heads.description import Body
from outrider.models.heads.hidden_states import StateCache
from outrider.models.heads.targets.autoregressive import skip_tokens
from outrider.models.heads.targets.base import HeadRunner
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.triton import decoder, layers
from outrider.models.triton.passes import BlockTables, Bucket, Buffers, Rows
from outrider.models.triton.ragged import feeds_long_prompt
from outrider.models.triton.recordings import Recordings


class RecordedDrafts(HeadRunner):
    """Drafts greedy chains with one recorded function, `_draft_chains`.

    It starts from the tokens of `_columns`, and from the target's hidden states before fusion. Subclasses may record
    other passes as well.
    """

    cache: StateCache
    _pages: DevicePagedCache  # the KV cache, if the head has one
    _more_entries = 0  # that a pass writes after those of a sequence

    def __init__(self, module: Any, tables: SharedWeights, *, record: Recorder | None = None, **options: Any) -> None:
        """Prepare as on torch, with these options. Without `record`, all passes run eagerly.

        Raises:
            UnsupportedModel: the kernels cannot run this head.
        """
        super().__init__(module, tables, **options)
        self.kernels = "triton"
        together = self.description.parallel_draft_tokens  # a shorter draft takes as long
        self._make_recordings = partial(
            Recordings,
            self._tables(),
            make=self._function,
            record=record,
            states=self._input_memory,
            fed=self._most_fed,
            length=lambda steps: together or min(steps, self.max_draft_tokens),
        )
        self._reset()

    def _tables(self) -> BlockTables:
        """Make the KV cache, and return its block tables."""
        body: Body = self.module.body
        capacity = self.context + self._more_entries
        self._pages = DevicePagedCache(
            slots=self.slots,
            capacity=capacity,
            layers=body.layers * self.description.modules,
            heads=body.key_heads,
            dim=body.dim,
            dtype=self._dtype,
            device=self.device,
        )
        self.cache.replace_inner(self._pages, more_entries=self._more_entries)
        one = torch.ones(capacity + 1, 1, device=self.device)
        self._unrotated = (one, torch.zeros_like(one))  # the module rotates queries and keys
        return self._pages

    def _most_fed(self, steps: int) -> int:
        """Return the most tokens of a sequence that are fed after a draft of `steps` tokens."""
        return steps + 1

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        steps = max(batch.draft_budget)
        bucket = self._bucket(batch, steps, vocab if vocab < self.vocab else 0)
        if bucket is None:
            return super().draft_greedy(batch, vocab, stop_rule)
        tokens = self._keep(batch, self._run_pass(bucket, batch))
        return DraftChains(tokens=tokens[: len(batch.seqs), :steps].clone(), count=batch.draft_budget)

    def _bucket(self, batch: Batch, steps: int, vocab: int = 0) -> Bucket | None:
        """Return the bucket of a pass that drafts `steps` tokens; None: there is none."""
        columns = self._columns(batch)
        if steps > self.max_draft_tokens or feeds_long_prompt(columns, -1):
            return None
        return self.graphs.bucket(columns, empty(len(batch.seqs), self.device), -1, steps=steps, vocab=vocab)

    def _run_pass(self, bucket: Bucket, batch: Batch) -> Any:
        """Copy the inputs of a pass to the device, and run it. The next pass writes to the same memory."""
        columns = self._columns(batch)
        self._reserve(columns)
        buffers, run = self.graphs.find(bucket)
        self._fill(buffers, batch, columns)
        return run()

    def refresh_shared(self, tables: SharedWeights) -> None:
        super().refresh_shared(tables)
        self._reset()  # the recorded passes read the older tables

    def graph_bytes(self) -> int:
        """Bytes of recorded passes, besides weights and cache."""
        return self.graphs.bytes()

    def _columns(self, batch: Batch) -> Batch:
        """Return the tokens that a pass runs over. The states at their positions are its input."""
        return skip_tokens(batch)

    def _reserve(self, columns: Batch) -> None:
        """Reserve memory for a pass that drafts, whose tokens are `columns`."""

    def _more_states(self, batch: Batch) -> list[Sequence[torch.Tensor]]:
        """Return further inputs of a pass, each with a tensor for every sequence."""
        return []

    def _draft_chains(self, buffers: Buffers) -> Any:
        """Draft greedily and return the tokens [R, steps], or what `_keep` takes."""
        raise NotImplementedError

    def _score_fixed(self, buffers: Buffers) -> Any:
        """Run a pass that chooses no tokens."""
        raise NotImplementedError

    def _keep(self, batch: Batch, result: Any) -> torch.Tensor:
        """Return the tokens of a result of `_draft_chains`. Keep what the next round needs."""
        return result  # type: ignore[no-any-return]

    def _function(self, buffers: Buffers) -> Callable[[], Any]:
        """Return the function of a pass of fixed shape."""
        return partial(self._draft_chains if buffers.bucket.steps else self._score_fixed, buffers)

    def _fill(self, buffers: Buffers, batch: Batch, columns: Batch) -> None:
        """Copy the inputs of a pass over `columns` to the device."""
        buffers.fill(columns, empty(len(batch.seqs), self.device), -1, self.graphs.memory)
        spans = zip(columns.seqs, columns.start, columns.ends, strict=True)
        parts = [self.hidden_states.parts(seq.slot, start, end) for seq, start, end in spans]
        fill_rows(buffers.states[0], buffers.bucket.rows, parts)
        for to, values in zip(buffers.states[1:], self._more_states(batch), strict=True):
            fill_rows(to, buffers.bucket.rows, [[value] for value in values])

    def _fused(self, buffers: Buffers) -> torch.Tensor:
        """Return the fused states [T, H] of a pass."""
        states = self.hidden_states.finish(buffers.states[0]).to(self._dtype)
        return self.module.fuse_states(states)  # type: ignore[no-any-return]

    def _input_memory(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Return memory for the states of a pass: those of the target before fusion."""
        shape = (len(self.description.aux_states.layers), self.description.target_hidden)
        return (self._zeros(bucket.rows * bucket.columns, *shape),)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self._dtype, device=self.device)

    def _choose(self, logits: torch.Tensor, vocab: int) -> torch.Tensor:
        """Return the likeliest target ids [*] below `vocab`, or of all if it is 0, for logits [*, Vd]."""
        if vocab:
            logits = logits.masked_fill(self.module.ids >= vocab, -torch.inf)
        return self.module.ids[logits.argmax(-1)]  # type: ignore[no-any-return]

    def _attend(self, layer: int, qkv: Sequence[torch.Tensor], groups: Sequence[Rows], window: int) -> torch.Tensor:
        """Write keys and values [key heads, T, D] of a layer. Return the attention output [heads, T, D]."""
        flat = torch.cat(tuple(qkv)).transpose(0, 1).flatten(1)
        dim = qkv[0].shape[-1]
        pages = self._pages.pages[:, layer]
        out = decoder.attend_groups(flat, groups, pages, self._unrotated, scale=dim**-0.5, window=window)
        return out.view(len(flat), -1, dim).transpose(0, 1)

    def _write(self, layer: int, rows: Rows, pair: Sequence[torch.Tensor]) -> None:
        """Write keys and values [key heads, T, D] of a layer."""
        flat = torch.cat(tuple(pair)).transpose(0, 1).flatten(1)
        pages = self._pages.pages[:, layer]
        layers.rotate_and_write(flat, *self._unrotated, rows.position, rows.entry, rows.table, pages)

    def _reset(self) -> None:
        """Drop the recorded passes."""
        self.graphs: Recordings = self._make_recordings()


def fill_rows(to: torch.Tensor, rows: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy the values of each sequence to its row of `to` [rows * columns, *], in one call. Zeros follow them."""
    filler = to.new_zeros(len(to) // rows, *to.shape[1:])
    pieces: list[torch.Tensor] = []
    for own in parts:
        pieces += own
        pieces.append(filler[sum(map(len, own)) :])
    pieces += [filler] * (rows - len(parts))
    torch.cat(pieces, out=to)
