"""How many bytes a pass reads, and how many lie in memory: weights and caches, the target's and the draft's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from outrider.bench.contestants import Job
from outrider.llm import LLM
from outrider.models.prepack import can_prepack
from outrider.plan.speedup import sequences_instead
from outrider.propose.base import Proposer
from outrider.propose.registry import draft_model


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes in memory while all rows run."""

    sequences: int  # at once
    context: int  # tokens that a row can hold
    target_weights: int
    target_cache: int
    draft_weights: int = 0
    draft_cache: int = 0
    other: int | None = None  # all else that torch holds on a GPU: graphs and buffers; None on a CPU

    @property
    def draft_in_sequences(self) -> float:
        """Rows of this context that the target's cache could hold where the draft's weights and cache lie."""
        row = self.target_cache / self.sequences
        return sequences_instead(draft_weights=self.draft_weights, draft_cache=self.draft_cache, row_cache=row)

    def as_dict(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "context": self.context,
            "target_weight_bytes": self.target_weights,
            "target_cache_bytes": self.target_cache,
            "draft_weight_bytes": self.draft_weights,
            "draft_cache_bytes": self.draft_cache,
            "other_bytes": self.other,
            "draft_in_sequences": self.draft_in_sequences,
        }


def measure_memory(llm: LLM, jobs: Sequence[Job]) -> MemoryUse:
    """Weigh what is held while `jobs` run, as many as there are rows."""
    parts = llm.parts
    endless = [replace(job.params, ignore_eos=True, max_tokens=None) for job in jobs]  # or the first would leave early
    ids = [id for job, params in zip(jobs, endless, strict=True) for id in llm.submit(job.prompt, params)]
    emitting: set[int] = set()
    while llm.engine.busy() and len(emitting) < len(
        ids
    ):  # a recurrent cache holds a state for each row that runs, and for no other
        emitting |= {row.request.id for row in llm.engine.step() if row.num_output_tokens}
    cache, (weights, stripes) = parts.target.cache.bytes(), _draft_bytes(parts.proposer)
    other = _held(parts.device, parts.target.bytes() + cache + weights + stripes)
    for id in ids:
        llm.abort(id)
    return MemoryUse(
        sequences=len(jobs),
        context=parts.context,
        target_weights=parts.target.bytes(),
        target_cache=cache,
        draft_weights=weights,
        draft_cache=stripes,
        other=other,
    )


def _held(device: torch.device, known: int) -> int | None:
    """Bytes that torch holds on a GPU beyond `known` ones."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what it keeps for later and nobody uses, such as the buffers of measurements
    return max(torch.cuda.memory_reserved(device) - known, 0)


def _draft_bytes(proposer: Proposer) -> tuple[int, int]:
    """Bytes of a draft model's weights and of its cache; of another proposer's memory nothing is known."""
    model = draft_model(proposer)
    return (0, 0) if model is None else (model.bytes(), model.cache.bytes())


def bytes_per_pass(llm: LLM, folder: Path) -> int:
    """Bytes of weights that one pass reads: all but an embedding table that serves for looking up alone."""
    table, tied = _embedding(folder)
    parts = llm.parts
    # A head that is packed or quantised is a copy of its own.
    copied = can_prepack(parts.device, parts.dtype) or parts.target.kernels not in ("torch", "graphs")
    return parts.target.bytes() - (table * parts.dtype.itemsize if copied or not tied else 0)


def flops_per_token(folder: Path) -> float:
    """Two for each weight that a token meets on its way, which an embedding table for looking up alone is not."""
    table, tied = _embedding(folder)
    weights = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return 2.0 * (weights - (0 if tied else table))


def _embedding(folder: Path) -> tuple[int, bool]:
    """How many weights the embedding table has, and whether they make the logits as well."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    sizes = config.get_text_config()
    return sizes.vocab_size * sizes.hidden_size, bool(config.tie_word_embeddings)


def cache_bytes_per_token(llm: LLM) -> float:
    """Bytes that a pass reads of the target's cache for each cached token.

    A recurrent state grows with no text, and is small beside the weights: it counts as nothing.
    """
    return float(llm.parts.target.cache.usage().token_bytes)
