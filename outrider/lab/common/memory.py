"""The memory of weights and caches of target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.proposer import Proposer
from outrider.core.types import SequenceState
from outrider.drafting.plan.speedup import sequences_instead
from outrider.drafting.propose.leaves import draft_model
from outrider.engine.drive import drive
from outrider.lab.common.jobs import Job

if TYPE_CHECKING:
    from outrider.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes in memory while all sequences run."""

    sequences: int  # at once
    context: int  # longest sequence in tokens
    target_weight_bytes: int
    target_cache_bytes: int
    draft_weight_bytes: int = 0
    draft_cache_bytes: int = 0
    other_bytes: int | None = None  # of torch on a GPU, such as graphs and buffers; None: on a CPU

    @property
    def draft_in_sequences(self) -> float:
        """Sequences that the target's cache could hold in place of the draft's weights and cache."""
        return sequences_instead(
            draft_weights=self.draft_weight_bytes,
            draft_cache=self.draft_cache_bytes,
            row_cache=self.target_cache_bytes / self.sequences,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"draft_in_sequences": self.draft_in_sequences}


def measure_memory(llm: LLM, jobs: Sequence[Job]) -> MemoryUse:
    """Return the memory use while all `jobs` run, one per sequence."""
    parts = llm.parts
    seqs: list[SequenceState] = []
    for job in jobs:
        # Without an end: no sequence may finish before the last one has started.
        params = replace(job.params, ignore_eos=True, max_tokens=None)
        seqs += map(llm.add, llm.request_maker.of_tokens(job.prompt, params, job.source, seed=job.seed))
    with closing(drive(llm.engine, seqs)) as rounds:
        # Caches grow with the running sequences, so wait until all of them have emitted a token.
        for _ in rounds:
            if all(seq.num_output_tokens for seq in seqs):
                break
        target_weights = parts.target.bytes()
        target_cache = parts.target.cache.bytes()
        draft_weights, draft_cache = _draft_bytes(parts.proposer)
        other = _other_bytes(parts.device, target_weights + target_cache + draft_weights + draft_cache)
    return MemoryUse(
        sequences=len(jobs),
        context=parts.context,
        target_weight_bytes=target_weights,
        target_cache_bytes=target_cache,
        draft_weight_bytes=draft_weights,
        draft_cache_bytes=draft_cache,
        other_bytes=other,
    )


def _other_bytes(device: torch.device, known: int) -> int | None:
    """Return the bytes that torch holds on a GPU besides the `known` ones, or None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # free the unused memory that torch caches, such as buffers of measurements
    return max(torch.cuda.memory_reserved(device) - known, 0)


def _draft_bytes(proposer: Proposer) -> tuple[int, int]:
    """Return the bytes of a draft model's weights and cache. The memory of other proposers counts 0."""
    model = draft_model(proposer)
    return (0, 0) if model is None else (model.bytes(), model.cache.bytes())
