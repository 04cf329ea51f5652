"""Runs the engine in a thread of its own, behind an asyncio interface."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter

from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Round, SequenceState
from outrider.engine.build import EngineParts
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.llm import LLM, Prompt
from outrider.serve.monitoring.drift import Drift
from outrider.serve.monitoring.latency import LatencyMetrics
from outrider.serve.prompt_encoder import PromptEncoder, with_own_tokenizer
from outrider.serve.stream.drafts import drafts_of
from outrider.serve.stream.text import StreamText
from outrider.serve.stream.ticket import TOGETHER, RequestStream, StreamChunk, StreamContent, Wakeup

_log = logging.getLogger("outrider.serve")
_IDLE = 0.05  # seconds between checks whether the server stops
_DEGRADED = 8  # consecutive failed rounds until /health returns 503
_LATELY, _LAME = 64, 8  # recent rounds, and failed ones among them, until the server is degraded


class QueueFull(OutriderError):
    """The queue is full."""


class AsyncLLM:
    """Steps the engine in a thread while there are requests.

    Only this thread uses the engine. Other threads send it commands. The methods for clients never block the event
    loop.
    """

    def __init__(self, llm: LLM, *, max_queued_requests: int, max_num_seqs: int) -> None:
        """Accept at most `max_num_seqs + max_queued_requests` requests at a time."""
        self.front = with_own_tokenizer(llm)  # the engine thread uses the other tokenizer
        self.reader = PromptEncoder(self.front)
        self.spell = cache(lambda token: self.front.decode([token]))  # text of a single token, for the event loop
        self.clocks = LatencyMetrics()
        self._llm = llm
        self.slots = max_num_seqs
        self._max_requests = max_num_seqs + max_queued_requests
        self._notes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[int, RequestStream] = {}
        self._news: dict[RequestStream, SequenceState] = {}  # streams with new tokens
        self._told = 0.0  # time of the last notification
        self._bell: Wakeup | None = None  # of the event loop of the clients
        self._taken = self._ended = (
            0  # counters of requests: the event loop changes the first, the engine thread the second
        )
        self._stopping = False
        self._over = False  # whether the thread has ended
        self.failed_rounds = 0
        self._failing = 0  # since the last successful round
        self._lately: deque[bool] = deque(maxlen=_LATELY)  # by recent round: whether it failed
        self._error, self._alike = "", 0  # the last error, and how often it occurred in a row
        self.drifts = tuple(Drift() for _ in llm.parts.proposers)
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._llm.stats

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return min(self._taken - self._ended, self.slots)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._taken - self._ended - self.running

    @property
    def failure(self) -> str:
        """Why the server must be restarted; "" while it works."""
        if self._failing >= _DEGRADED:
            return f"the last {self._failing} rounds of the engine have failed"
        return "" if self._stopping or (self._thread.is_alive() and not self._over) else "the engine does not run"

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why errors reduce speculation. Texts are still right. Empty while there are none."""
        off = tuple(
            f"proposer {guard.name} is switched off for now: it has failed {guard.failures} times"
            for guard in self.front.parts.isolated
            if guard.disabled
        )
        if (failed := sum(tuple(self._lately))) < _LAME:
            return off
        return (*off, f"{failed} of the last {_LATELY} rounds failed, and ran again without guesses: {self._error}")

    @property
    def engine(self) -> Engine:
        """The engine, for its counters. Only the engine thread may do more."""
        return self._llm.engine

    def start(self) -> None:
        """Start the engine thread."""
        self._llm.engine.on_round = self._content
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, end running requests, and write the plan file, if there is one."""
        self._stopping = True
        self._thread.join()
        self._llm.try_save_plan()

    def submit(self, prompt: Prompt, params: SamplingParams, watch: StreamContent) -> list[RequestStream]:
        """Queue a prompt. Returns a stream for each of its `n` completions, with the content that `watch` names.

        Raises:
            QueueFull: too many requests wait.
            InvalidParam: the prompt or a parameter does not fit the model.
        """
        if self._stopping:
            raise QueueFull("the server is stopping; ask another one")
        if (open := self._taken - self._ended) + params.n > self._max_requests:
            raise QueueFull(f"{open} completions run or wait, and {self._max_requests} may; try again later")
        tokens = self.front.encode(prompt)
        try:
            requests = self.front.requests(tokens, params)
        except InvalidParam:
            raise
        except OutriderError as error:
            raise InvalidParam(_blamed(self.front.parts, tokens, params), str(error)) from error
        if (params.max_tokens or 0) > (context := self.front.parts.context):
            said = f"max_tokens is {params.max_tokens}, and the context holds {context}; ask for fewer"
            raise InvalidParam("max_tokens", said)
        self._bell = self._bell or Wakeup(asyncio.get_running_loop())
        tickets = [
            RequestStream(each, StreamText(self.front.decode, self.spell, params.stop), watch) for each in requests
        ]
        self._taken += len(tickets)
        self._notes.put(lambda: self._add(tickets))
        if self._over:  # the thread may have ended before it read the command
            raise QueueFull("the engine does not run any more; ask another server")
        return tickets

    def cancel(self, tickets: Sequence[RequestStream]) -> None:
        """Cancel requests. Finished ones are not affected."""
        self._notes.put(lambda: self._drop(tickets))

    def _add(self, tickets: Sequence[RequestStream]) -> None:
        for ticket in tickets:
            self._open[ticket.request.id] = ticket
            self.clocks.begin(ticket.request.id)
        for ticket in tickets:
            self._llm.add(ticket.request)

    def _drop(self, tickets: Sequence[RequestStream]) -> None:
        for ticket in tickets:
            if self._open.pop(ticket.request.id, None):
                self._llm.abort(ticket.request.id)
                ticket.put(StreamChunk(error="nobody waits for this any more"))
                self._done(ticket, "cancelled")
        self._wake(tickets)

    def _run(self) -> None:
        reason = "the server was stopped before this was done"
        try:
            while not self._stopping:
                self._run_round()
        except Exception as error:
            _log.exception("the engine's thread has failed")
            reason = f"the engine failed: {error}"
        finally:
            self._over = True
            self._close(reason)

    def _close(self, reason: str) -> None:
        """End all requests, including those whose commands the thread has not read."""
        while not self._notes.empty():
            try:
                self._notes.get_nowait()()
            except Exception:
                _log.exception("a note was left undone")
        try:
            self._fail(reason)
        except Exception:
            _log.exception("what ran could not be taken back")

    def _run_round(self) -> None:
        """Handle commands, and run a round if there are requests."""
        engine = self._llm.engine
        self._handle_commands(wait=not engine.busy())
        if engine.busy():
            if self._news and engine.prefilling() and perf_counter() - self._told >= TOGETHER / 2:
                self._publish_round()  # a round with a prefill takes long
            self._step()

    def _handle_commands(self, *, wait: bool) -> None:
        """Run the queued commands. Wait for one if there are no requests."""
        if not wait and self._notes.empty():
            return
        try:
            self._notes.get(timeout=_IDLE)() if wait else self._notes.get_nowait()()
            while True:
                self._notes.get_nowait()()
        except Empty:
            pass

    def _step(self) -> None:
        rows = self._round()
        now, edges = perf_counter(), dict[RequestStream, SequenceState]()
        for row in rows:
            ticket = self._open.get(row.request.id)
            if ticket and (row.num_output_tokens > ticket.written or row.finish_reason):
                edge = bool(row.finish_reason) or not ticket.written
                ticket.written = row.num_output_tokens
                self.clocks.record(row.request.id, now, row.num_output_tokens)
                if ticket.watch >= StreamContent.ROUNDS:
                    self._publish(row, ticket)
                    edge |= row.request.id not in self._open  # the round could not be published, so stop
                if edge:
                    edges[ticket] = row
                elif ticket.watch is not StreamContent.END:
                    self._news[ticket] = row
        if now - self._told >= TOGETHER:
            self._publish_round()
        self._notify(edges)

    def _publish_round(self) -> None:
        """Notify streams of all rounds since the last notification, because waking a reader is expensive."""
        self._told, news, self._news = perf_counter(), self._news, {}
        for drift, stats in zip(self.drifts, self._llm.engine.alternative_stats, strict=True):
            drift.update(stats)
        self._notify(news)

    def _notify(self, news: Mapping[RequestStream, SequenceState]) -> None:
        for ticket, row in news.items():
            if ticket.request.id in self._open and (row.num_output_tokens > ticket.given or row.finish_reason):
                self._publish(row, ticket)
        self._wake(list(news))

    def _round(self) -> Sequence[SequenceState]:
        engine = self._llm.engine
        try:
            rows = engine.step()
            self._failing = 0
            self._lately.append(False)
            return rows
        except Exception as error:  # whatever a model raises, the server continues
            self._failed(error)
            try:
                return engine.recover(error)
            except Exception as last:
                self._fail(f"the engine failed: {last}")
                return ()

    def _failed(self, error: Exception) -> None:
        """Count a failed round. Repeated errors are logged at the 2nd, 4th, 8th... time only."""
        self.failed_rounds += 1
        self._failing += 1
        self._lately.append(True)
        said = f"{type(error).__name__}: {error}"
        self._error, self._alike = said, self._alike + 1 if said == self._error else 1
        if self._alike == 1:
            _log.error("a round failed; its rows take it again, each alone and without guesses", exc_info=error)
        elif self._alike.bit_count() == 1:  # 2, 4, 8, ...
            _log.error("%d rounds have failed alike, and ran again without guesses: %s", self._alike, said)

    def _publish(self, row: SequenceState, ticket: RequestStream) -> None:
        try:
            piece = self._chunk(row, ticket)
        except Exception as error:  # an error of this text does not affect other requests
            _log.exception("a completion could not be told")
            self._llm.abort(row.request.id)
            piece = StreamChunk(error=f"the text cannot be written: {error}")
        ticket.put(piece)
        if row.finish_reason or piece.error:
            del self._open[row.request.id]
            self._done(ticket, "error" if piece.error else str(row.finish_reason))

    def _chunk(self, row: SequenceState, ticket: RequestStream) -> StreamChunk:
        completion = self._llm.completion(row) if row.finish_reason else None
        return StreamChunk(
            tokens=tuple(row.token_ids[len(row.request.prompt_token_ids) + ticket.given :]),
            from_draft=tuple(row.from_draft[ticket.given :]),
            logprobs=tuple(row.logprobs[ticket.given : row.num_output_tokens]),
            drafts=ticket.guesses,
            completion=None if row.error else completion,
            error=row.error,
        )

    def _content(self, round: Round) -> None:
        for b, row in enumerate(round.batch.seqs):
            ticket = self._open.get(row.request.id)
            if ticket and ticket.watch is StreamContent.DRAFTS:
                ticket.guesses = drafts_of(round, b, self._llm.parts.draft_sources)

    def _wake(self, tickets: Sequence[RequestStream]) -> None:
        if tickets and self._bell:
            self._bell.notify(tickets)

    def _fail(self, reason: str) -> None:
        """End all open requests."""
        tickets = list(self._open.values())
        self._open.clear()
        for ticket in tickets:
            ticket.put(StreamChunk(error=reason))
            self._done(ticket, "error")
        self._wake(tickets)
        for ticket in tickets:  # last, because a broken engine may raise
            self._llm.abort(ticket.request.id)

    def _done(self, ticket: RequestStream, how: str) -> None:
        self._ended += 1
        self.clocks.end(ticket.request.id, how)


def _blamed(parts: EngineParts, tokens: Sequence[int], params: SamplingParams) -> str:
    """Return the parameter that `LLM.requests` has rejected."""

    def strange(ids: Iterable[int]) -> bool:
        return any(not 0 <= token < parts.vocab for token in ids)

    wrong = {
        "prompt": not tokens or len(tokens) >= parts.context or strange(tokens),
        "stop_token_ids": strange(params.stop_token_ids),
        "logit_bias": strange(params.logit_bias),
        "proposer": params.proposer not in (None, *parts.proposers),
        "verifier": params.verifier not in (None, *parts.verifiers),
    }
    return next(filter(wrong.get, wrong), "constraint")
