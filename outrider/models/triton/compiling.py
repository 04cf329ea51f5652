"""Compile many kernels at the same time. One after the other they would take minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import cpu_count
from typing import Any


@contextmanager
def only_compiled() -> Iterator[None]:
    """Let a launch of a kernel compile it in a thread, and not run it. What a pass returns is then arbitrary."""
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
