"""OpenTelemetry traces of requests and of the phases of rounds. Off by default.

The trace of a request has the spans `request`, `queue` (until it has a slot), `prefill` (until its
first token) and `decode`. Some rounds are traced as well: a span `round` with `draft`, `verify` and
`commit`. It belongs to the oldest request of the batch and has links to the others.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.packages import needed_by
from outrider.core.types import SequenceState
from outrider.engine.stopwatch import RoundTimes
from outrider.serve.monitoring.request_log import Entry, entry_of

ROUNDS_PER_TRACE = 32  # one of so many rounds is traced
_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    context: Any  # of its span
    submitted: float  # time
    admitted: float | None = None
    first_token: float | None = None


class Tracer:
    """Makes spans with a tracer provider of the OpenTelemetry SDK.

    The event loop calls `submitted`, and the engine thread calls `finished` and `round`.
    """

    def __init__(self, provider: Any, *, rounds_per_trace: int = ROUNDS_PER_TRACE) -> None:
        from opentelemetry import context, propagate, trace

        self._provider = provider
        self._trace = trace
        self._context = context
        self._propagate = propagate
        self._tracer = provider.get_tracer("outrider")
        self._epoch_ns = time_ns() - int(perf_counter() * 1e9)
        self._rounds_per_trace = rounds_per_trace
        self._rounds = 0
        self._open: dict[int, _Open] = {}

    def start(self, scope: Scope) -> Any:
        """Return a span of an HTTP request, which continues the trace of the client's traceparent header."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.start_as_current_span(
            "request",
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )

    def submitted(self, ids: Sequence[int]) -> None:
        """Record that the current HTTP request waits for these completions."""
        now = perf_counter()
        current = self._context.get_current()
        for id in ids:
            self._open[id] = _Open(current, now)

    def finished(self, id: int) -> None:
        """Make the spans of a completion that has ended."""
        if (request := self._open.pop(id, None)) is None:
            return
        now = perf_counter()
        admitted = request.admitted or now
        first_token = request.first_token or now
        self._span("queue", request.context, request.submitted, admitted)
        if request.admitted is not None:
            self._span("prefill", request.context, admitted, first_token)
        if request.first_token is not None:
            self._span("decode", request.context, first_token, now)

    def round(self, seqs: Sequence[SequenceState], times: RoundTimes) -> None:
        """Record when requests got a slot and their first token, and trace some rounds."""
        traced = []
        for seq in seqs:
            if request := self._open.get(seq.request.id):
                traced.append(request)
                request.admitted = request.admitted or times.began
                if request.first_token is None and seq.num_output_tokens:
                    request.first_token = times.committed
        self._rounds += 1
        if traced and self._rounds % self._rounds_per_trace == 0:
            self._trace_round(traced, len(seqs), times)

    def _trace_round(self, traced: Sequence[_Open], num_seqs: int, times: RoundTimes) -> None:
        oldest = min(traced, key=lambda request: request.submitted)
        links = [
            self._trace.Link(self._trace.get_current_span(request.context).get_span_context())
            for request in traced
            if request is not oldest
        ]
        attributes = {"outrider.sequences": num_seqs, "outrider.draft_tokens": times.draft_tokens}
        span = self._tracer.start_span(
            "round", oldest.context, links=links, attributes=attributes, start_time=self._ns(times.began)
        )
        inside = self._trace.set_span_in_context(span, oldest.context)
        self._span("draft", inside, times.began, times.drafted)
        self._span("verify", inside, times.drafted, times.verified)
        self._span("commit", inside, times.verified, times.committed)
        span.end(self._ns(times.committed))

    def _span(self, name: str, context: Any, start: float, end: float) -> None:
        self._tracer.start_span(name, context, start_time=self._ns(start)).end(self._ns(end))

    def _ns(self, seconds: float) -> int:
        """Return a time of `perf_counter` as nanoseconds since 1970."""
        return self._epoch_ns + int(seconds * 1e9)

    def close(self) -> None:
        """Send the last spans."""
        self._provider.shutdown()


class TraceMiddleware:
    """ASGI middleware: a span for each completion request. It runs inside of `RequestLog`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start(scope) as span:
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                span.set_attributes(_attributes(entry_of(scope), status))


def _attributes(entry: Entry, status: int) -> dict[str, Any]:
    """Return what is known at the end of a request, by OpenTelemetry's conventions where they have a name."""
    attributes: dict[str, Any] = {
        "http.response.status_code": status,
        "outrider.request_id": entry.id,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.output_tokens": entry.output_tokens,
    }
    if entry.stats:
        attributes["gen_ai.usage.input_tokens"] = entry.prompt_tokens
        attributes["outrider.accepted_tokens"] = sum(sum(each.accepted) for each in entry.stats)
    if entry.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = entry.finish_reason.split("+")
    return attributes


def make_tracer() -> Tracer:
    """Return a tracer that exports by OTLP over HTTP. The OTEL_* variables set the endpoint, the sampler and the name.

    Raises:
        OutriderError: the SDK is not installed.
    """
    with needed_by("--otel", "otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    # `create` prefers a name that is given here to the one in the environment.
    has_name = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if has_name else {"service.name": "outrider"}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)
