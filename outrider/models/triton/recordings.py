"""The passes of fixed shapes of a Triton target, recorded as CUDA graphs.

A pass is recorded at the first use of its bucket. The kernels read lengths and block tables on the
device, so one recording serves sequences of any length, in any slot. Without a recorder, the same
function runs eagerly: a recording changes no bit of the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from operator import add
from os import cpu_count
from time import perf_counter
from typing import Any

import torch

from outrider.core.types import Batch, Draft
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.triton.passes import MAX_COLUMNS, PROMPT_BUCKET, BlockTables, Bucket, Buffers

_log = logging.getLogger("outrider")
_MAX_TOKENS = 512  # of a pass of fixed shape
_CHAIN_SIZES = (2, 16, 64)  # columns of the feed of a chain
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)


class Recordings:
    """The recorded passes of one model."""

    def __init__(
        self,
        memory: BlockTables,
        *,
        make: Callable[[Buffers], Callable[[], Any]],
        record: Recorder | None,
        states: Callable[[Bucket], tuple[torch.Tensor, ...]] | None = None,
        fed: Callable[[int], int] | None = None,
        length: Callable[[int], int] | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            memory: the KV cache.
            make: returns the function of a pass whose inputs are in buffers.
            record: records it; None: passes run eagerly.
            states: returns memory for the hidden states that a pass of a draft head starts from.
            fed: returns the most tokens of a sequence that are fed after a draft of some length; None: two.
            length: returns that of the recorded chain that serves a draft of some length; None: the same.
        """
        self.seconds = 0.0  # of recording
        self.compiled = False  # the layers are kernels already
        self.memory = memory
        self._make = make
        self.record = record  # None: passes run eagerly
        self._states = states
        self._fed = fed or (lambda _: 2)
        self._length = length or (lambda steps: steps)
        self._buffers: dict[Bucket, Buffers] = {}
        self._runs: dict[Bucket, Callable[[], Any]] = {}
        self._failed: set[Bucket] = set()
        self._allocation = 0  # of the memory that the recorded passes read

    def bytes(self) -> int:
        """Return the bytes of recordings and buffers."""
        recorded = self.record.bytes() if self.record else 0
        return recorded + sum(buffers.bytes() for buffers in self._buffers.values())

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the recorded buckets."""
        return tuple(self._runs)

    def bucket(self, batch: Batch, draft: Draft, first: int, *, steps: int = 0, vocab: int = 0) -> Bucket | None:
        """Return the bucket of a pass; None: it has too many tokens."""
        columns = max(max(draft.width) - max(first, 0), 0)
        if first < 0:
            columns = max(map(add, map(len, batch.feed), draft.width))
        rows = _round_up(len(batch.seqs))
        # The feed of a round is shorter where draft tokens were rejected. One recording serves all.
        usual = max(columns, self._fed(steps)) if steps else columns
        bucket = Bucket(
            rows=rows,
            columns=_columns(usual, rows, steps),
            nodes=_round_up(draft.size) if draft.size else 0,
            trees=not draft.chain,
            steps=self._length(steps) if steps else 0,
            vocab=vocab,
        )
        if not _fits(bucket):
            bucket = replace(bucket, columns=_columns(columns, rows, steps))
        return bucket if _fits(bucket) and draft.size <= MAX_COLUMNS else None

    def find(self, bucket: Bucket) -> tuple[Buffers, Callable[[], Any]]:
        """Return the buffers of a bucket and its pass, which is recorded at first."""
        if self.memory.allocations != self._allocation:
            # `resize` has replaced the memory of the cache, and `sleep` perhaps that of shared weights, too.
            self._runs.clear()
            self._allocation = self.memory.allocations
        if bucket not in self._buffers:
            self._buffers[bucket] = self._allocate(bucket)
        if bucket not in self._runs and bucket not in self._failed:
            self._try(bucket)
        buffers = self._buffers[bucket]
        return buffers, self._runs.get(bucket) or self._make(buffers)

    @torch.inference_mode()
    def warm(
        self,
        *,
        rows: int,
        length: int,
        columns: Iterable[int] = (),
        steps: Iterable[int] = (),
        vocab: int = 0,
        compiled: bool = True,
        exact: bool = True,
    ) -> float:
        """Record the passes that decode `rows` sequences, with all kernels compiled first. Return the seconds spent.

        Args:
            rows: sequences.
            length: not used: a recorded pass serves any length.
            columns: tokens per sequence of scoring passes. Those of draft heads are recorded when they are used.
            steps: draft lengths.
            vocab: drafted ids are below it; 0: all.
            compiled: not used: the layers are kernels already.
            exact: not used.
        """
        before = self.seconds
        rows = _round_up(rows)
        buckets = []
        if not self._states:  # the scoring passes of draft heads have other shapes
            buckets = [Bucket(rows=rows, columns=_round_up(count), nodes=_round_up(count - 1)) for count in columns]
        for count in steps:
            feed = _columns(self._fed(count), rows, count)
            buckets.append(Bucket(rows=rows, columns=feed, nodes=0, steps=self._length(count), vocab=vocab))
        if not self._states:
            buckets.append(PROMPT_BUCKET)
        fitting = [bucket for bucket in dict.fromkeys(buckets) if bucket.rows * bucket.columns <= _MAX_TOKENS]
        if self.record is not None:
            began = perf_counter()
            with only_compiled():
                for bucket in fitting:
                    self._make(self._allocate(bucket))()
            self.seconds += perf_counter() - began
        for bucket in fitting:
            if bucket not in self._runs:
                self.find(bucket)
        return self.seconds - before

    def _allocate(self, bucket: Bucket) -> Buffers:
        states = self._states(bucket) if self._states else ()
        return Buffers(bucket, self.memory.reach, self.memory.device, states)

    def _try(self, bucket: Bucket) -> None:
        """Record a bucket. If that fails, its passes run without a recording."""
        if self.record is None:
            return
        began = perf_counter()
        # New buffers have padding only, so that the runs of the recorder write nothing to the cache.
        self._buffers[bucket] = self._allocate(bucket)
        try:
            self._runs[bucket] = self.record(self._make(self._buffers[bucket]))
        except RuntimeError as reason:
            self._failed.add(bucket)
            if isinstance(reason, torch.OutOfMemoryError):
                self._runs.clear()
            _log.warning(
                "the pass over %d x %d tokens cannot be recorded as a CUDA graph, and takes longer (%s)",
                bucket.rows,
                bucket.columns,
                reason,
            )
        finally:
            self.seconds += perf_counter() - began


def _fits(bucket: Bucket) -> bool:
    return bucket.columns <= MAX_COLUMNS and bucket.rows * bucket.columns <= _MAX_TOKENS


def _columns(count: int, rows: int, steps: int) -> int:
    """Return the columns of a bucket for `count` tokens of a row. Chains have few sizes, as each length has its own."""
    return _round_up(count, _CHAIN_SIZES if steps and rows * _CHAIN_SIZES[-1] <= _MAX_TOKENS else _SIZES)


def _round_up(count: int, sizes: Sequence[int] = _SIZES) -> int:
    """Return the smallest size of a bucket that is at least `count`."""
    return next((size for size in sizes if size >= count), 2 * _SIZES[-1]) if count else 0


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
