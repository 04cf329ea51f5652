"""Passes of fixed shapes, recorded as CUDA graphs. A pass, or a whole chain of a draft model, is one launch.

A bucket is the shape of a recorded pass. It is recorded at its second use. A bucket that a larger
recording covers uses that one, and is recorded only after more uses: a recording takes as long as
several eager passes, and a padded pass takes hardly longer than an exact one. A longer draft than
needed takes longer with each step. It runs only where it takes less time than the eager pass, and
until the steps that are not needed have taken as long as a recording. `warm` records buckets ahead
of time, and can compile the layers first, which takes a minute. Until a bucket is recorded, and for
shapes without a bucket, such as long prompts, the eager pass runs.

The first round of a recorded bucket runs both passes. If they differ by more than rounding, only
the eager pass is used from then on. A bucket that cannot be recorded runs eagerly, and the others
stay recorded. If memory is missing, all recordings are freed first.

With tensor parallelism a recorded pass has the collective operations of NCCL. NCCL needs every rank
to replay it, or none: a bucket is padded, so the messages of the eager pass have another size. All
ranks run the same rounds and so record the same buckets in the same order. After a recording and
after a comparison they agree on the result. If one rank fails in the middle of a recording, the
others wait in its collective operations, so it ends all of them.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.core.tree import empty
from outrider.core.types import Batch, Draft, Scores
from outrider.errors import UnsupportedModel
from outrider.models.torch.cuda_recorder import Recorder
from outrider.models.torch.graph_buckets import (
    MAX_COLUMNS,
    MAX_TOKENS,
    covers,
    describe,
    lengths,
    power,
    round_up,
    share_of_steps,
    work,
)
from outrider.models.torch.graph_check import Pass, compare
from outrider.models.torch.recurrent.fixed import FixedCommit
from outrider.models.torch.rounding import TRIALS
from outrider.models.torch.static_pass import Bucket, StaticModel, StaticPass
from outrider.runtime.ranks import all_ranks, seconds_of_first_rank

_log = logging.getLogger("outrider")
_USES_UNTIL_RECORDED = 2  # uses of a bucket until it is recorded
COVERED_USES_UNTIL_RECORDED = 32  # the same if a larger recording covers it
_MAX_EVICTIONS = 2  # times that missing memory frees all recordings
MAX_FAILURES = 4  # buckets that cannot be recorded, without one that can
_RECOMPILATIONS = 256  # one per shape and kind of layer


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Let one compilation serve many shapes, also if two of its sizes happened to be equal."""
    duck_shape = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS), duck_shape, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on settings of the compiler
        yield


@dataclass(slots=True, kw_only=True, eq=False)
class _Recorded:
    """The recorded pass of one bucket."""

    buffers: StaticPass
    replay: Callable[[], Any]
    commit: FixedCommit | None  # of recurrent layers
    compiled: bool  # whether its layers are compiled
    seconds: float = 0.0  # of a replay; 0: not measured, because the pass has no steps
    eager_seconds: float = 0.0  # of the same operations without the recording
    trials: int = TRIALS  # comparisons with the eager pass that may still fail; 0: the pass is not compared


class _Failure(NamedTuple):
    """Why a bucket cannot be recorded."""

    reason: str
    no_memory: bool = False
    for_all: bool = False  # whether no bucket of this model can be recorded


def _feed_states(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Copy the feed of each sequence from [slots, L, H]. The next pass writes to the same memory."""
    return tuple(values[seq.slot, : len(feed)].clone() for seq, feed in zip(batch.seqs, batch.feed, strict=True))


class Graphs:
    """The recorded passes of one model."""

    def __init__(self, model: StaticModel, *, slots: int, record: Recorder) -> None:
        self.seconds = 0.0  # time of recording, including compilation
        # Whether the layers compile; None: not tried. Recurrent layers do not: they keep what they stage.
        self.compiled: bool | None = False if model.states else None
        self.model = model
        self._slots = slots
        self.recorder = record
        self._recorded: dict[Bucket, _Recorded] = {}
        self._uses: Counter[Bucket] = Counter()
        self._failed: set[Bucket] = set()  # buckets that cannot be recorded
        self._recording_seconds = inf  # of one step of a draft, the shortest so far
        self._evictions = 0
        self.enabled = True

    def bytes(self) -> int:
        """Return the bytes of recordings and buffers."""
        buffers = sum(recorded.buffers.bytes() for recorded in self._recorded.values())
        return self.recorder.bytes() + self.model.bytes() + buffers

    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._recorded)

    def score(self, batch: Batch, draft: Draft, first: int, eager: Callable[[], Scores]) -> Scores | None:
        """Run `Target.score` as a recorded pass. None: no bucket fits. `eager` is the pass without recording."""
        if not self.model.takes(batch, first):
            return None
        scored = Pass(batch, draft, first)
        has_feed = first < 0
        num_nodes = draft.size - max(first, 0) + has_feed
        if not (draft.chain or has_feed):
            return None
        bucket = self._bucket(batch, max(*scored.token_counts(), num_nodes), draft.width, trees=not draft.chain)
        if bucket is None or (recorded := self._find(bucket)) is None:
            return None
        recorded.buffers.fill(batch, draft, first)
        self.model.cache.reserve(batch, draft.width, first)
        logits, best, node_states, token_states, _ = self._replay(recorded, batch, draft.width)
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
        return scores if not recorded.trials else self._compare(recorded, scored, scores, eager)

    def draft_greedy(self, batch: Batch, vocab: int) -> torch.Tensor | None:
        """Run `Target.draft_greedy` as a recorded pass. None: no bucket fits."""
        if not self.model.takes(batch, -1):
            return None
        steps = max(batch.draft_budget)
        columns = max(2, *map(len, batch.feed))
        written = [budget - 1 for budget in batch.draft_budget]  # the last draft token is not written to the cache
        bucket = self._bucket(batch, columns, written, steps=steps, vocab=vocab)
        if bucket is None or (recorded := self._find(bucket)) is None:
            return None
        recorded.buffers.fill(batch, empty(len(batch.seqs), self.model.cache.device), -1)
        self.model.cache.reserve(batch, written)
        tokens: torch.Tensor = self._replay(recorded, batch, written).tokens
        return tokens[: len(batch.seqs), :steps].clone()

    def _replay(self, recorded: _Recorded, batch: Batch, draft_sizes: Sequence[int]) -> Any:
        """Run a recorded pass over `draft_sizes` [B] draft tokens of each sequence, and keep it for the commit."""
        out = recorded.replay()
        if recorded.commit is not None:
            bucket = recorded.buffers.bucket
            recorded.commit.adopt(batch, draft_sizes, bucket.columns if bucket.steps else None)
        return out

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
            exact: record each bucket. False: leave out those that a larger recording with as many
                steps covers.
        """
        seconds_before = self.seconds
        if compiled and self.compiled is not False:  # passes that were recorded before are recorded again
            self._recorded = {bucket: recorded for bucket, recorded in self._recorded.items() if recorded.compiled}
        buckets = []
        for bucket_length in lengths(min(length, self.model.cache.spare), self.model.cache.spare):
            base = Bucket(rows=power(rows, self._slots), columns=2, length=bucket_length)
            buckets += [replace(base, columns=power(count, MAX_COLUMNS)) for count in columns]
            buckets += [replace(base, steps=count, vocab=vocab) for count in steps]
        for bucket in sorted(set(buckets), key=work, reverse=True):  # the largest first, since they cover others
            covering = [other for other in self._recorded if covers(other, bucket) and other.steps == bucket.steps]
            known = bucket in self._recorded or bucket in self._failed or (not exact and covering)
            if self.enabled and self.model.ready() and not known:
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
        rows = power(1 + max(seq.slot for seq in batch.seqs), self._slots)
        parts = zip(batch.start, batch.feed, draft_sizes, strict=True)
        stop = max(start + len(feed) + count for start, feed, count in parts)
        bucket_columns = power(columns, MAX_COLUMNS)
        if columns > bucket_columns or rows * bucket_columns > MAX_TOKENS:
            return None
        length = round_up(stop, self.model.cache.spare)
        return Bucket(rows=rows, columns=bucket_columns, length=length, trees=trees, steps=steps, vocab=vocab)

    def _find(self, bucket: Bucket) -> _Recorded | None:
        """Return the recording of a bucket, or of one with longer drafts. Record the bucket after enough uses."""
        if not self.enabled or not self.model.ready():
            return None
        if bucket in self._recorded:
            return self._recorded[bucket]
        covering = self._covering(bucket)
        self._uses[bucket] += 1
        if bucket not in self._failed and self._uses[bucket] >= self._uses_until_recorded(bucket, covering):
            recorded = self._make(bucket, compiled=bool(self.compiled))
            covering = covering if covering in self._recorded else None  # a recording may have freed it
            if recorded is not None:
                return recorded
        return self._recorded[covering] if covering else None

    def _covering(self, bucket: Bucket) -> Bucket | None:
        """Return the smallest recorded bucket that runs this one with padding, in less time than the eager pass."""

        def beats_eager(other: Bucket, recorded: _Recorded) -> bool:
            return recorded.seconds <= share_of_steps(bucket, other) * recorded.eager_seconds

        candidates = [other for other, recorded in self._recorded.items() if beats_eager(other, recorded)]
        return min((other for other in candidates if covers(other, bucket)), key=work, default=None)

    def _uses_until_recorded(self, bucket: Bucket, covering: Bucket | None) -> float:
        """Return the uses of a bucket from which on it is recorded."""
        if covering is None:
            return _USES_UNTIL_RECORDED
        # A longer draft wastes this time at each use.
        wasted = self._recorded[covering].seconds * (1 - share_of_steps(bucket, covering))
        if wasted <= 0:
            return COVERED_USES_UNTIL_RECORDED
        return max(bucket.steps * self._recording_seconds / wasted, _USES_UNTIL_RECORDED)

    def _make(self, bucket: Bucket, *, compiled: bool) -> _Recorded | None:
        """Record a bucket. None: it cannot be recorded, so its passes are eager from now on."""
        compiled &= self.compiled is not False
        failure = self._try(bucket, compiled=compiled)
        if failure and failure.no_memory and self._evictions < _MAX_EVICTIONS:
            self._evict()
            failure = self._try(bucket, compiled=compiled)
        if failure and compiled and not failure.no_memory:
            self._stop_compiling(failure.reason)
            failure = self._try(bucket, compiled=False)
        if failure:
            self._give_up(bucket, failure)
        return self._recorded.get(bucket)

    def _try(self, bucket: Bucket, *, compiled: bool) -> _Failure | None:
        """Record a bucket, and return why it failed in a rank; None: it is recorded."""
        start = perf_counter()
        buffers: StaticPass | None = None
        replay: Callable[[], Any] | None = None
        commit: FixedCommit | None = None
        failure = _Failure("another rank cannot record it")
        self.model.compiled = compiled
        try:
            buffers = StaticPass(self.model, bucket)
            run = buffers.draft_greedy if bucket.steps else buffers.score
            with _compiler_settings() if compiled else nullcontext():
                replay = self.recorder(run)
            if states := self.model.states:
                commit = FixedCommit(states, replay().staged, self.recorder)
        except torch.OutOfMemoryError as reason:
            failure = _Failure(str(reason), no_memory=True)
        except (RuntimeError, UnsupportedModel) as reason:
            failure = _Failure(str(reason), for_all=isinstance(reason, UnsupportedModel))
        finally:
            self.model.compiled = False
            took = perf_counter() - start
            self.seconds += took
        if not all_ranks(replay is not None, f"a pass cannot be recorded ({failure.reason})"):
            no_memory = not all_ranks(not failure.no_memory)
            return failure._replace(no_memory=no_memory, for_all=not all_ranks(not failure.for_all))
        assert buffers is not None
        assert replay is not None
        recorded = _Recorded(buffers=buffers, replay=replay, commit=commit, compiled=compiled)
        if bucket.steps:
            self._measure(recorded, seconds_of_first_rank(took))
        self.compiled = compiled or self.compiled
        self._recorded[bucket] = recorded
        return None

    def _measure(self, recorded: _Recorded, recording_seconds: float) -> None:
        """Measure what the draft of a recording takes. It has no sequences, so it writes to the spare entries."""
        steps = recorded.buffers.bucket.steps
        self._recording_seconds = min(self._recording_seconds, recording_seconds / steps)
        self.recorder.seconds(recorded.replay)  # to warm up
        recorded.seconds = seconds_of_first_rank(self.recorder.seconds(recorded.replay))
        recorded.eager_seconds = seconds_of_first_rank(self.recorder.seconds(recorded.buffers.draft_greedy))

    def _evict(self) -> None:
        """Free all recordings. Those that are used again are recorded again."""
        self._evictions += 1
        self._recorded.clear()
        self.model.drop_logits()

    def _give_up(self, bucket: Bucket, failure: _Failure) -> None:
        """Run the passes of a bucket eagerly from now on, or those of all buckets if none can be recorded."""
        self._failed.add(bucket)
        if failure.for_all or (len(self._failed) >= MAX_FAILURES and not self._recorded):
            self._disable(f"passes cannot be recorded ({failure.reason})")
            return
        remedy = "; to leave memory for graphs, lower max_num_seqs or max_model_len" if failure.no_memory else ""
        _log.log(
            logging.WARNING if len(self._failed) == 1 else logging.INFO,
            "%s cannot be recorded as a CUDA graph (%s). This shape, and each further one that"
            " cannot be recorded, runs without a graph and takes longer; other shapes are not"
            " affected%s",
            describe(bucket),
            failure.reason,
            remedy,
        )

    def _compare(self, recorded: _Recorded, scored: Pass, scores: Scores, eager: Callable[[], Scores]) -> Scores:
        """Compare the scores of a recorded pass with those of the eager pass, and return the latter."""
        result = compare(self.model, recorded.buffers, scored, scores, eager)
        recorded.trials = 0 if result.agree else recorded.trials - 1
        if not result.agree and not recorded.trials:
            reason = "a recorded pass differs from the eager pass"
            if recorded.compiled:
                self._stop_compiling(reason)
                self._recorded = {bucket: kept for bucket, kept in self._recorded.items() if not kept.compiled}
            else:
                self._disable(reason)
        return result.scores

    def _stop_compiling(self, reason: str) -> None:
        """Record passes without compilation from now on."""
        _log.warning("layers are not compiled: %s", reason)
        self.compiled = False

    def _disable(self, reason: str) -> None:
        _log.warning("CUDA graphs are disabled: %s", reason)
        self.enabled = False
        self._recorded.clear()
