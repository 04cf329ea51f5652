"""A target that runs Medusa and Hydra heads on a GPU, all draft tokens as one CUDA graph."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.core.types import Batch
from outrider.models.heads.targets.autoregressive import skip_tokens
from outrider.models.heads.targets.parallel import ParallelTarget
from outrider.models.heads.targets.recorded import RecordedDrafts
from outrider.models.triton.passes import BlockTables, Buffers


class RecordedParallel(RecordedDrafts, ParallelTarget):
    """Runs a `ParallelHead`. It has no KV cache: a pass takes the last token and the state before it."""

    def _tables(self) -> BlockTables:
        return _NoTables(self.device)

    def _most_fed(self, steps: int) -> int:
        return 1

    def _columns(self, batch: Batch) -> Batch:
        last = replace(batch, start=tuple(end - 1 for end in batch.ends), feed=tuple(feed[-1:] for feed in batch.feed))
        return skip_tokens(last)

    def _draft_chains(self, buffers: Buffers) -> torch.Tensor:
        last = buffers.last()
        state = self.hidden_states.finish(buffers.states[0])[last, -1].to(self._dtype)
        tokens = buffers.tokens()[last][:, None]
        for head in range(buffers.bucket.steps):
            chosen = self._choose(self.module(state, tokens, head), buffers.bucket.vocab)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        return tokens[:, 1:]


class _NoTables:
    """The block tables of a head without a KV cache."""

    allocations = 0
    reach = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rows(self, slots: Sequence[int]) -> array[int]:
        return array("i")
