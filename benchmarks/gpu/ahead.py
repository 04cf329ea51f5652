"""Compile the Triton kernels of a pair ahead, many at the same time. One after the other they would take minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import cpu_count
from time import perf_counter
from typing import Any

import torch
from pair import Setup, cached_batch, draft_of

from outrider.core.target import Target

_PROMPT = 512  # tokens, which pass through the kernels of prompts
_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of a pass
_DRAFT_TOKENS = (1, 2)


def compile_kernels(setup: Setup) -> dict[str, Any]:
    """Compile the kernels of the passes over one sequence. Return the seconds."""
    if setup.inputs.device.type != "cuda":
        return {"skipped": "there is nothing to compile without a GPU"}
    began = perf_counter()
    target, draft = setup.models
    with _only_compiled(), _not_recorded(target), _not_recorded(draft), torch.inference_mode():
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


@contextmanager
def _only_compiled() -> Iterator[None]:
    """Let a launch of a kernel compile it in a thread, and not run it."""
    from triton.runtime import JITFunction
    from triton.runtime._async_compile import AsyncCompileMode

    run: Callable[..., Any] = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
