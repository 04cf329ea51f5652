"""Compile the Triton kernels of a pair ahead, many at the same time. One after the other they would take minutes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from pair import Setup, cached_batch, draft_of

from outrider.core.target import Target
from outrider.models.triton.recordings import only_compiled

_PROMPT = 512  # tokens, which pass through the kernels of prompts
_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of a pass
_DRAFT_TOKENS = (1, 2)


def compile_kernels(setup: Setup) -> dict[str, Any]:
    """Compile the kernels of the passes over one sequence. Return the seconds."""
    if setup.inputs.device.type != "cuda":
        return {"skipped": "there is nothing to compile without a GPU"}
    began = perf_counter()
    target, draft = setup.models
    with only_compiled(), _not_recorded(target), _not_recorded(draft), torch.inference_mode():
        _run(target, _TOKENS)
        _run(draft, _DRAFT_TOKENS)
        with cached_batch(draft, _PROMPT, setup.inputs.k) as batch:
            draft.draft_greedy(batch, setup.llm.parts.vocab)
    return {"seconds": perf_counter() - began}


def _run(model: Target, token_counts: Sequence[int]) -> None:
    """Run each pass once."""
    with cached_batch(model, _PROMPT) as batch:
        for count in token_counts:
            model.score(batch, draft_of(count - 1, model.device))


@contextmanager
def _not_recorded(model: Any) -> Iterator[None]:
    """Let a model record no passes, which would be without kernels here."""
    recorder, model.graphs.record = model.graphs.record, None
    try:
        yield
    finally:
        model.graphs.record = recorder
