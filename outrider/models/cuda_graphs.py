"""Passes of fixed shapes, recorded as CUDA graphs. A pass, or a whole chain of a draft model, is one launch.

A bucket is the shape of a recorded pass. It is recorded at its second use. A bucket that a larger recording covers uses
that one, and is recorded only after more uses: a recording takes as long as several eager passes, and a padded pass
takes hardly longer than an exact one. `warm` records buckets ahead of time, and can compile the layers first, which
takes a minute. Until a bucket is recorded, and for shapes without a bucket, such as long prompts, the eager pass runs.
The first round of a recorded bucket runs both passes. If they differ by more than rounding, or recording fails, only
the eager pass is used from then on.

With tensor parallelism a recorded pass has the collective operations of NCCL. NCCL needs every rank to replay it, or
none: a bucket is padded, so the messages of the eager pass have another size. All ranks run the same rounds and so
record the same buckets in the same order. After a recording and after a comparison they agree on the result. If one
rank fails in the middle of a recording, the others wait in its collective operations, so it ends all of them.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakSet

import torch

from outrider.core.tree import empty
from outrider.core.types import Batch, Draft, Scores
from outrider.errors import UnsupportedModel
from outrider.models.rounding import TOLERANCE, TRIALS
from outrider.models.static_pass import Bucket, StaticModel, StaticPass
from outrider.parallel.ranks import all_ranks, current

_log = logging.getLogger("outrider")
_MAX_COLUMNS = 64  # tokens per sequence
_MAX_TOKENS = 512  # tokens of a pass
_MIN_LENGTH = 128  # cache entries of the shortest bucket, and the smallest step between buckets
_USES_UNTIL_RECORDED = 2  # uses of a bucket until it is recorded
_COVERED_USES_UNTIL_RECORDED = 32  # the same if a larger recording covers it
_CHEAP_TOKENS = 64  # tokens that a pass can have in about the time of one, since it reads the same weights
_CHEAP_LENGTH = 512  # cache entries of a slot whose reading takes little time beside that of the weights
_CHEAP_ENTRIES = 4096  # the same of all slots
_RECOMPILATIONS = 256  # one per shape and kind of layer


class Recorder(Protocol):
    """Records a function. The result repeats it, writing to the same memory."""

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record `run`. It is called several times."""

    def bytes(self) -> int:
        """Return the bytes of all recordings."""


class CudaRecorder:
    """Records CUDA graphs in one memory pool. Only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._bytes = 0
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        if (ranks := current()) is not None:
            ranks.holders.add(self)

    def bytes(self) -> int:
        return self._bytes

    def release(self) -> None:
        """Free the recordings. NCCL waits for them when its communicator is destroyed. None may run afterwards."""
        for graph in self._graphs:
            graph.reset()

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        with torch.cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self._device)
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                run()  # the first call creates library handles and compiles layers
                # A synchronization with the host fails here rather than during the capture.
                with _forbid_synchronization():
                    run()
        finally:  # after a failure as well: the buffers of the pass are freed while the device may still read them
            main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # During a capture, the watchdog of NCCL queries events in its own thread, which "global" would not allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._graphs.add(graph)
        self._bytes += max(torch.cuda.memory_reserved(self._device) - reserved, 0)

        def replay() -> Any:
            graph.replay()
            return out

        return replay


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Let one compilation serve many shapes, also if two of its sizes happened to be equal."""
    duck_shape = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS), duck_shape, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on settings of the compiler
        yield


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@dataclass(slots=True, kw_only=True, eq=False)
class _Recorded:
    """The recorded pass of one bucket."""

    buffers: StaticPass
    replay: Callable[[], Any]
    compiled: bool  # whether its layers are compiled
    trials: int = TRIALS  # comparisons with the eager pass that may still fail; 0: the pass is not compared


def _feed_states(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Copy the feed of each sequence from [slots, L, H]. The next pass writes to the same memory."""
    return tuple(values[seq.slot, : len(feed)].clone() for seq, feed in zip(batch.seqs, batch.feed, strict=True))


class Graphs:
    """The recorded passes of one model."""

    def __init__(self, model: StaticModel, *, slots: int, record: Recorder) -> None:
        self.seconds = 0.0  # time of recording, including compilation
        self.compiled: bool | None = None  # whether the layers compile; None: not tried
        self._model = model
        self._slots = slots
        self._record = record
        self._recorded: dict[Bucket, _Recorded] = {}
        self._uses: Counter[Bucket] = Counter()
        self._enabled = True

    def bytes(self) -> int:
        """Return the bytes of recordings and buffers."""
        return self._record.bytes() + sum(recorded.buffers.bytes() for recorded in self._recorded.values())

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the recorded buckets."""
        return tuple(self._recorded)

    def score(self, batch: Batch, draft: Draft, first: int, eager: Callable[[], Scores]) -> Scores | None:
        """Run `Target.score` as a recorded pass. None: no bucket fits. `eager` is the pass without recording."""
        skip = max(first, 0)
        has_feed = first < 0
        num_nodes = draft.size - skip + has_feed
        lengths = zip(batch.feed, draft.width, strict=True)
        columns = [len(feed) * has_feed + max(width - skip, 0) for feed, width in lengths]
        if not (draft.chain or has_feed):
            return None
        bucket = self._bucket(batch, max(*columns, num_nodes), draft.width, trees=not draft.chain)
        if bucket is None or (recorded := self._find(bucket)) is None:
            return None
        recorded.buffers.fill(batch, draft, first)
        self._model.cache.reserve(batch, draft.width, first)
        logits, best, node_states, token_states = recorded.replay()
        batch_size = len(batch.seqs)
        # The results are copied, because the next pass writes to the same memory.
        feed_states = {}
        if has_feed:
            feed_states = {layer: _feed_states(states, batch) for layer, states in token_states.items()}
        scores = Scores(
            logits=logits[:batch_size, :num_nodes].to(torch.float32, copy=True),
            hidden_states={layer: states[:batch_size, :num_nodes].clone() for layer, states in node_states.items()},
            best=best[:batch_size, :num_nodes].clone(),
            feed_hidden_states=feed_states,
        )
        return scores if not recorded.trials else self._compare(recorded, scores, eager())

    def draft_greedy(self, batch: Batch, vocab: int) -> torch.Tensor | None:
        """Run `Target.draft_greedy` as a recorded pass. None: no bucket fits."""
        steps = max(batch.draft_budget)
        columns = max(2, *(len(feed) for feed in batch.feed))
        written = [budget - 1 for budget in batch.draft_budget]  # the last draft token is not written to the cache
        bucket = self._bucket(batch, columns, written, steps=steps, vocab=vocab)
        if bucket is None or (recorded := self._find(bucket)) is None:
            return None
        recorded.buffers.fill(batch, empty(len(batch.seqs), self._model.cache.device), -1)
        self._model.cache.reserve(batch, written)
        return recorded.replay()[: len(batch.seqs), :steps].clone()  # type: ignore[no-any-return]

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
        """Record the passes that decode `rows` sequences of up to `length` tokens. Return the seconds spent.

        Nothing can be recorded before the first pass has allocated the cache.

        Args:
            rows: sequences.
            length: tokens of a sequence.
            columns: tokens per sequence of scoring passes.
            steps: draft lengths.
            vocab: drafted ids are below it; 0: all.
            compiled: compile the layers before recording.
            exact: record each bucket. False: leave out those that a larger recording covers.
        """
        seconds_before = self.seconds
        if compiled and self.compiled is not False:  # passes that were recorded before are recorded again
            self._recorded = {bucket: recorded for bucket, recorded in self._recorded.items() if recorded.compiled}
        buckets = []
        for bucket_length in _lengths(min(length, self._model.cache.spare), self._model.cache.spare):
            base = Bucket(rows=_power(rows, self._slots), columns=2, length=bucket_length)
            buckets += [replace(base, columns=_power(count, _MAX_COLUMNS)) for count in columns]
            buckets += [replace(base, steps=count, vocab=vocab) for count in steps]
        for bucket in sorted(set(buckets), key=_work, reverse=True):  # the largest first, since they cover others
            known = bucket in self._recorded or (not exact and any(_covers(other, bucket) for other in self._recorded))
            if self._enabled and self._model.ready() and not known:
                self._make(bucket, compiled=compiled)
        return self.seconds - seconds_before

    def _bucket(
        self,
        batch: Batch,
        columns: int,
        draft_sizes: Sequence[int],
        *,
        trees: bool = False,
        steps: int = 0,
        vocab: int = 0,
    ) -> Bucket | None:
        """Return the bucket of a pass with up to `columns` tokens per sequence; None if it is too large."""
        rows = _power(1 + max(seq.slot for seq in batch.seqs), self._slots)
        parts = zip(batch.start, batch.feed, draft_sizes, strict=True)
        stop = max(start + len(feed) + count for start, feed, count in parts)
        bucket_columns = _power(columns, _MAX_COLUMNS)
        if columns > bucket_columns or rows * bucket_columns > _MAX_TOKENS:
            return None
        length = _round_up(stop, self._model.cache.spare)
        return Bucket(rows=rows, columns=bucket_columns, length=length, trees=trees, steps=steps, vocab=vocab)

    def _find(self, bucket: Bucket) -> _Recorded | None:
        """Return the recording of a bucket, or of one with longer drafts. Record the bucket after enough uses."""
        if not self._enabled or not self._model.ready():
            return None
        if bucket in self._recorded:
            return self._recorded[bucket]
        covering = min((other for other in self._recorded if _covers(other, bucket)), key=_work, default=None)
        self._uses[bucket] += 1
        if self._uses[bucket] >= (_COVERED_USES_UNTIL_RECORDED if covering else _USES_UNTIL_RECORDED):
            return self._make(bucket, compiled=bool(self.compiled))
        return self._recorded[covering] if covering else None

    def _make(self, bucket: Bucket, *, compiled: bool) -> _Recorded | None:
        """Record a bucket. If that fails in any rank, disable all recordings and return None."""
        start = perf_counter()
        replay: Callable[[], Any] | None = None
        failure = "another rank cannot record it"
        buffers = StaticPass(self._model, bucket)
        compiled &= self.compiled is not False
        self._model.compiled = compiled
        try:
            run = buffers.draft_greedy if bucket.steps else buffers.score
            with _compiler_settings() if compiled else nullcontext():
                replay = self._record(run)
        except (RuntimeError, UnsupportedModel) as reason:
            failure = str(reason)
        finally:
            self._model.compiled = False
            self.seconds += perf_counter() - start
        if not all_ranks(replay is not None, f"a pass cannot be recorded ({failure})") or replay is None:
            if compiled:
                _log.warning("layers are not compiled: %s", failure)
                self.compiled = False
                return self._make(bucket, compiled=False)
            self._disable(f"its pass cannot be recorded ({failure})")
            return None
        self.compiled = compiled or self.compiled
        self._recorded[bucket] = _Recorded(buffers=buffers, replay=replay, compiled=compiled)
        return self._recorded[bucket]

    def _compare(self, recorded: _Recorded, scores: Scores, eager: Scores) -> Scores:
        """Compare the scores of a recorded pass with those of the eager pass, and return the latter.

        The eager pass ran second, so its keys and values are in the cache.
        """
        finite = eager.logits.amax(-1).isfinite()
        error = (scores.logits - eager.logits).norm(dim=-1)
        differs = error > TOLERANCE[self._model.dtype] * eager.logits.norm(dim=-1)
        agree = all_ranks(not ((differs | ~scores.logits.amax(-1).isfinite()) & finite).any())
        recorded.trials = 0 if agree else recorded.trials - 1
        if not agree and not recorded.trials:
            self._disable("a recorded pass differs from the eager pass")
        return eager

    def _disable(self, reason: str) -> None:
        _log.warning("CUDA graphs are disabled: %s", reason)
        self._enabled = False
        self._recorded.clear()


def _covers(other: Bucket, bucket: Bucket) -> bool:
    """Return whether the pass of `other` can run `bucket` with padding, in little more time."""
    same_kind = all(getattr(other, key) == getattr(bucket, key) for key in ("trees", "vocab"))
    same_kind &= bool(other.steps) == bool(bucket.steps)
    fits = all(getattr(other, key) >= getattr(bucket, key) for key in ("rows", "columns", "length", "steps"))
    cheap_tokens = max(_CHEAP_TOKENS, 2 * bucket.rows * bucket.columns)
    cheap_entries = max(_CHEAP_ENTRIES, 2 * bucket.rows * bucket.length)
    cheap = other.rows * other.columns <= cheap_tokens and other.rows * other.length <= cheap_entries
    return same_kind and fits and cheap and other.length <= max(_CHEAP_LENGTH, 2 * bucket.length)


def _work(bucket: Bucket) -> tuple[int, int, int]:
    """Return what makes a pass slow, the most important first."""
    return bucket.steps, bucket.rows * bucket.columns, bucket.rows * bucket.length


def _power(count: int, limit: int) -> int:
    """Return the smallest power of two that is at least `count`, capped at `limit`."""
    return min(1 << (count - 1).bit_length(), limit)


def _round_up(length: int, limit: int) -> int:
    """Return the bucket length of `length`, capped at `limit`. From 512 on it is at most a quarter longer."""
    step = max(_MIN_LENGTH, 1 << max((length - 1).bit_length() - 3, 0))
    return min(-(-length // step) * step, limit)


def _lengths(length: int, limit: int) -> list[int]:
    """Return all bucket lengths up to that of `length`."""
    lengths = [_round_up(1, limit)]
    while lengths[-1] < min(length, limit):
        lengths.append(_round_up(lengths[-1] + 1, limit))
    return lengths
