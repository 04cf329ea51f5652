"""Runs the engine in its own thread, behind an asyncio interface."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TypeVar

from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.stats import Stats
from outrider.core.token_text import SingleTokens
from outrider.core.types import Request, Round, SequenceState, SpeechOutput
from outrider.engine.codec import EncodedPrompt
from outrider.engine.engine import Engine
from outrider.engine.requests import RequestMaker
from outrider.llm import LLM
from outrider.runtime.ranks import is_network_error
from outrider.serve.errors import STOPPED, QueueFull, ServerStops
from outrider.serve.monitoring.drift import Drift
from outrider.serve.monitoring.latency import LatencyMetrics
from outrider.serve.monitoring.tracing import Tracer
from outrider.serve.prompt_encoder import PromptEncoder
from outrider.serve.stream.drafts import drafts_of
from outrider.serve.stream.request_stream import PUBLISH_INTERVAL, RequestStream, StreamChunk, StreamContent, Wakeup
from outrider.serve.stream.text import StreamText

T = TypeVar("T")
_log = logging.getLogger("outrider.serve")
_STOP_CHECK_INTERVAL = 0.05  # seconds between checks whether the server stops, while there are no requests
_UNHEALTHY_FAILURES = 8  # consecutive failed rounds until /health returns 503
_RECENT_ROUNDS = 64  # rounds in which failures are counted
_DEGRADED_FAILURES = 8  # failed rounds among the recent ones until the server is degraded


class AsyncLLM:
    """Steps the engine in a thread while there are requests.

    Only this thread uses the engine. Other threads send it commands. The methods for clients never
    block the event loop.
    """

    def __init__(self, llm: LLM, *, max_queued_requests: int, max_num_seqs: int) -> None:
        """Accept at most `max_num_seqs + max_queued_requests` requests at a time."""
        self.parts = llm.parts
        self.codec = llm.codec.copy()  # for the event loop; the engine thread has that of `llm`
        self.prompt_encoder = PromptEncoder(self.codec)
        self.single_tokens = SingleTokens(self.codec.tokenizer)  # for the event loop
        self.latency = LatencyMetrics()
        self.tracer: Tracer | None = None  # set before `start`
        self._llm = llm
        self._request_maker = RequestMaker(llm.parts, self.codec)
        self.max_num_seqs = max_num_seqs
        self._max_requests = max_num_seqs + max_queued_requests
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[int, RequestStream] = {}  # streams of unfinished requests, by request id
        self._unpublished: dict[RequestStream, SequenceState] = {}  # streams with tokens that are not published yet
        self._last_publish = 0.0  # time
        self._wakeup: Wakeup | None = None  # wakes the event loop of the clients
        self._num_accepted = 0  # requests; changed only by the event loop
        self._num_finished = 0  # requests; changed only by the engine thread
        self._refuses = False
        self._stopping = False
        self._paused = False  # changed only by the event loop
        self._holds = False  # whether new requests wait outside of the engine; changed only by the event loop
        self._held: list[Request] = []  # these requests
        self._thread_ended = False
        self.failed_rounds = 0
        self._consecutive_failures = 0
        self._recent_failures: deque[bool] = deque(maxlen=_RECENT_ROUNDS)  # by round: whether it failed
        self._last_error = ""
        self._error_repeats = 0  # how often the last error has occurred in a row
        self.drifts = tuple(Drift() for _ in self.parts.proposers)
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._llm.stats

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return min(self._num_accepted - self._num_finished, self.max_num_seqs)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._num_accepted - self._num_finished - self.running

    @property
    def failure(self) -> str:
        """Why the server must be restarted; "" while it works."""
        if self._consecutive_failures >= _UNHEALTHY_FAILURES:
            return f"the last {self._consecutive_failures} rounds of the engine have failed; restart the server"
        works = self._stopping or (self._thread.is_alive() and not self._thread_ended)
        return "" if works else "the engine thread has ended; restart the server"

    @property
    def stopping(self) -> bool:
        """Whether the server accepts no more requests."""
        return self._refuses or self._thread_ended

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why errors reduce speculation; () if they do not. Outputs are correct in either case."""
        reasons = tuple(
            f"proposer {guard.name} is switched off for now: it has failed {guard.failures} times"
            for guard in self.parts.isolated
            if guard.disabled
        )
        num_failed = sum(tuple(self._recent_failures))  # a copy, because the engine thread appends to it
        if num_failed < _DEGRADED_FAILURES:
            return reasons
        failures = (
            f"{num_failed} of the last {_RECENT_ROUNDS} rounds failed and were repeated without"
            f" draft tokens: {self._last_error}"
        )
        return (*reasons, failures)

    @property
    def engine(self) -> Engine:
        """The engine, to read its counters. Only the engine thread may call its methods."""
        return self._llm.engine

    def start(self) -> None:
        """Start the engine thread."""
        self._llm.engine.on_round = self._store_drafts
        if self.tracer:
            self._llm.engine.on_times = self.tracer.round
        self._thread.start()

    def refuse_requests(self) -> None:
        """Accept no more requests, because the server stops. Open requests are not affected."""
        self._refuses = True

    def stop(self) -> None:
        """Stop the engine thread, end all requests, and write the plan file, if there is one."""
        self._refuses = self._stopping = True
        if self._thread.is_alive():
            self._thread.join()
        self._llm.try_save_plan()

    def submit(
        self,
        encoded: EncodedPrompt,
        params: SamplingParams,
        content: StreamContent,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[RequestStream]:
        """Queue a prompt that `prompt_encoder` or `codec` has encoded.

        `speech_output` is for speech models. Return a stream with this content for each of its `n`
        completions.

        Raises:
            QueueFull: the queue is full.
            ServerStops: the server stops, or the engine thread has ended.
            InvalidParam: the prompt or a parameter does not fit the model.
        """
        if self._refuses:
            raise ServerStops(STOPPED)
        num_open = self._num_accepted - self._num_finished
        if num_open + params.n > self._max_requests:
            raise QueueFull(
                f"{num_open} completions run or wait, and at most {self._max_requests} may; try again later"
            )
        requests = self._request_maker.make(encoded, params, speech_output=speech_output)
        context = self.parts.context
        if (params.max_tokens or 0) > context:
            raise InvalidParam(
                "max_tokens",
                f"max_tokens is {params.max_tokens}, and the context length is {context}; use a smaller value",
            )
        self._wakeup = self._wakeup or Wakeup(asyncio.get_running_loop())
        streams = []
        for request in requests:
            text = StreamText(self.codec.decode, self.single_tokens.text, params.stop, request.prompt_token_ids)
            streams.append(RequestStream(request, text, content))
        if self.tracer:
            self.tracer.submitted([stream.request.id for stream in streams])
        self._num_accepted += len(streams)
        self._commands.put(lambda: self._add(streams))
        if self._thread_ended:  # perhaps before it has run the command
            raise ServerStops("the engine thread has ended; send the request to another server")
        return streams

    def cancel(self, streams: Sequence[RequestStream]) -> None:
        """Cancel requests. Finished ones are not affected."""
        self._commands.put(lambda: self._abort(streams))

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run a function in the engine thread, between two rounds, and return its result.

        Raises:
            ServerStops: the engine thread has ended.
            Exception: what the function raises.
        """
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function(self._llm))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        if self._thread_ended:
            raise ServerStops("the engine thread has ended; restart the server")
        return await asyncio.shield(asyncio.wrap_future(future))  # the function also runs if its caller is canceled

    @property
    def paused(self) -> bool:
        """Whether the server does not generate, although it accepts requests."""
        return self._paused

    async def pause(self, mode: str) -> None:
        """Stop generating. New requests wait until `resume`.

        Args:
            mode: keep: running requests go on after `resume`. abort: they end with an error. wait:
                they end first.
        """
        if mode == "wait":
            self._holds = True
            while not self._paused and await self.call(lambda llm: llm.engine.busy()):
                await asyncio.sleep(_STOP_CHECK_INTERVAL)
        self._paused = True
        reason = "the server was paused, and running requests were aborted; send the request again"
        await self.call(lambda _: self._fail_all(reason) if mode == "abort" else None)

    def resume(self) -> None:
        """Go on generating."""
        self._paused = False
        self._holds = False
        self._commands.put(self._add_held)

    def abandon(self, reason: str) -> None:
        """End all requests with an error, while the engine thread waits for a rank that does not answer."""
        self._thread_ended = True
        self._close(reason)

    # Everything below runs in the engine thread.

    def _add(self, streams: Sequence[RequestStream]) -> None:
        for stream in streams:
            self._streams[stream.request.id] = stream
            self.latency.begin(stream.request.id)
        self._held += [stream.request for stream in streams]
        if not self._holds:
            self._add_held()

    def _add_held(self) -> None:
        """Queue the requests that have waited for the end of a pause."""
        while self._held:
            self._llm.add(self._held.pop(0))

    def _abort(self, streams: Sequence[RequestStream]) -> None:
        for stream in streams:
            if self._streams.pop(stream.request.id, None):
                self._held = [request for request in self._held if request.id != stream.request.id]
                self._llm.abort(stream.request.id)
                stream.put(StreamChunk(error="the request was canceled"))
                self._finish(stream, "canceled")
        self._wake(streams)

    def _run(self) -> None:
        reason = STOPPED
        try:
            while not self._stopping:
                self._run_round()
        except Exception as error:
            if is_network_error(error):
                reason = "another rank of tensor parallelism has failed; restart the server"
            else:
                _log.exception("the engine thread has failed")
                reason = f"the engine failed: {error}; see the log of the server"
            ranks = self._llm.engine.ranks
            if ranks and not self._stopping:
                self._thread_ended = True
                ranks.abandon(reason)
        finally:
            self._thread_ended = True
            self._close(reason)

    def _close(self, reason: str) -> None:
        """End all requests, including those whose commands the thread has not read."""
        while not self._commands.empty():
            try:
                self._commands.get_nowait()()
            except Exception:
                _log.exception("a command has failed while the engine thread ended")
        try:
            self._fail_all(reason)
        except Exception:
            _log.exception("the running requests could not be aborted")

    def _run_round(self) -> None:
        """Handle commands, and run a round if there are requests.

        It does not use `drive`, because requests come and go between rounds, and rounds pause or are repeated.
        """
        engine = self._llm.engine
        self._handle_commands(wait=not self._runs())
        if self._runs():
            if (
                self._unpublished
                and engine.prefilling()
                and perf_counter() - self._last_publish >= PUBLISH_INTERVAL / 2
            ):
                self._publish_all()  # before the round, because a prefill takes long
            self._step()

    def _runs(self) -> bool:
        """Return whether there is a round to run."""
        return self._llm.engine.busy() and not self._paused and self._llm.weights.ready

    def _handle_commands(self, *, wait: bool) -> None:
        """Run the queued commands. With `wait`, wait for the first one for a short time."""
        if not wait and self._commands.empty():
            return
        try:
            command = self._commands.get(timeout=_STOP_CHECK_INTERVAL) if wait else self._commands.get_nowait()
            command()
            while True:
                self._commands.get_nowait()()
        except Empty:
            pass

    def _step(self) -> None:
        """Run a round. Publish first and last tokens at once, and others when they are due."""
        seqs = self._run_engine()
        now = perf_counter()
        publish_now: dict[RequestStream, SequenceState] = {}
        for seq in seqs:
            stream = self._streams.get(seq.request.id)
            if stream and (seq.num_output_tokens > stream.num_tokens or seq.finish_reason):
                first_or_last = bool(seq.finish_reason) or not stream.num_tokens
                stream.seq = seq
                stream.num_tokens = seq.num_output_tokens
                self.latency.record(seq.request.id, now, seq.num_output_tokens)
                if stream.content >= StreamContent.ROUNDS:
                    self._publish(seq, stream)
                    # A stream that has failed is no longer open. Its reader must be woken to end.
                    first_or_last |= seq.request.id not in self._streams
                if first_or_last:
                    publish_now[stream] = seq
                elif stream.content is not StreamContent.END:
                    self._unpublished[stream] = seq
        if now - self._last_publish >= PUBLISH_INTERVAL:
            self._publish_all()
        self._publish_and_wake(publish_now)

    def _publish_all(self) -> None:
        """Publish the tokens of all rounds since the last call, because waking a reader is expensive."""
        self._last_publish = perf_counter()
        unpublished = self._unpublished
        self._unpublished = {}
        for drift, stats in zip(self.drifts, self._llm.engine.alternative_stats, strict=True):
            drift.update(stats)
        self._publish_and_wake(unpublished)

    def _publish_and_wake(self, seqs: Mapping[RequestStream, SequenceState]) -> None:
        for stream, seq in seqs.items():
            is_open = stream.request.id in self._streams
            if is_open and (seq.num_output_tokens > stream.num_published or seq.finish_reason):
                self._publish(seq, stream)
        self._wake(list(seqs))

    def _run_engine(self) -> Sequence[SequenceState]:
        """Run a round, and repeat it if it fails. Return the sequences of the round."""
        engine = self._llm.engine
        try:
            seqs = engine.step()
            self._consecutive_failures = 0
            self._recent_failures.append(False)
            return seqs
        except Exception as error:  # the server must survive every exception of a model
            if engine.ranks:  # the state of the other ranks is unknown
                raise
            self._count_failure(error)
            try:
                return engine.recover(error)
            except Exception as recovery_error:
                self._fail_all(f"the engine failed: {recovery_error}; see the log of the server")
                return ()

    def _count_failure(self, error: Exception) -> None:
        """Count a failed round. A repeated error is logged at the 1st, 2nd, 4th, 8th... time."""
        self.failed_rounds += 1
        self._consecutive_failures += 1
        self._recent_failures.append(True)
        message = f"{type(error).__name__}: {error}"
        self._error_repeats = self._error_repeats + 1 if message == self._last_error else 1
        self._last_error = message
        if self._error_repeats == 1:
            _log.error("a round failed; its sequences run again one by one, without draft tokens", exc_info=error)
        elif self._error_repeats.bit_count() == 1:  # a power of 2
            _log.error(
                "%d rounds failed with the same error and were repeated without draft tokens: %s",
                self._error_repeats,
                message,
            )

    def _publish(self, seq: SequenceState, stream: RequestStream) -> None:
        """Put the new tokens of a sequence into its stream."""
        try:
            chunk = self._make_chunk(seq, stream)
        except Exception as error:  # an error of this text does not affect other requests
            _log.exception("cannot decode a completion")
            self._llm.abort(seq.request.id)
            chunk = StreamChunk(
                error=f"cannot decode the tokens of this completion: {error}; see the log of the server"
            )
        stream.put(chunk)
        if seq.finish_reason or chunk.error:
            del self._streams[seq.request.id]
            self._finish(stream, "error" if chunk.error else str(seq.finish_reason))

    def _make_chunk(self, seq: SequenceState, stream: RequestStream) -> StreamChunk:
        completion = self._llm.completion(seq) if seq.finish_reason else None
        return StreamChunk(
            tokens=tuple(seq.token_ids[len(seq.request.prompt_token_ids) + stream.num_published :]),
            from_draft=tuple(seq.from_draft[stream.num_published :]),
            logprobs=tuple(seq.logprobs[stream.num_published : seq.num_output_tokens]),
            drafts=stream.drafts,
            completion=None if seq.error else completion,
            error=seq.error,
        )

    def _store_drafts(self, round: Round) -> None:
        """Store the drafts of a round in the streams that show them."""
        for b, seq in enumerate(round.batch.seqs):
            stream = self._streams.get(seq.request.id)
            if stream and stream.content is StreamContent.DRAFTS:
                stream.drafts = drafts_of(round, b, self.parts.draft_sources)

    def _wake(self, streams: Sequence[RequestStream]) -> None:
        if streams and self._wakeup:
            self._wakeup.notify(streams)

    def _fail_all(self, reason: str) -> None:
        """End all open requests with an error."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._held.clear()
        for stream in streams:
            stream.put(StreamChunk(error=reason))
            self._finish(stream, "error")
        self._wake(streams)
        for stream in streams:  # last, because a broken engine may raise
            self._llm.abort(stream.request.id)

    def _finish(self, stream: RequestStream, finish_reason: str) -> None:
        self._num_finished += 1
        self.latency.end(stream.request.id, finish_reason)
        if self.tracer:
            self.tracer.finished(stream.request.id)
