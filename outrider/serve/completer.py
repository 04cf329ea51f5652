"""Submits requests to the engine thread, and returns their outputs in one response or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.core.params import SamplingParams
from outrider.core.types import Completion, SpeechOutput
from outrider.engine.codec import EncodedPrompt
from outrider.errors import OutriderError
from outrider.serve.anthropic.errors import in_api_of
from outrider.serve.errors import STOPPED
from outrider.serve.monitoring.request_log import Entry, entry_of
from outrider.serve.openai.responses import ChunkBuilder, ResponseBuilder, error_response, retry_response
from outrider.serve.stream.request_stream import RequestStream, StreamChunk, StreamContent
from outrider.serve.stream.smoothing import smooth_chunks

if TYPE_CHECKING:
    from outrider.serve.async_llm import AsyncLLM

_CLIENT_CLOSED_REQUEST = 499  # the status that nginx logs for a closed connection; the client does not receive it


class _Limit(NamedTuple):
    """What has ended a request before its completions."""

    finish_reason: str  # in the request log
    message: str
    kind: str  # type of the error
    status: int


class Completer:
    """Completes requests. It cancels them after a timeout, or if the client disconnects."""

    def __init__(self, async_llm: AsyncLLM, timeout: float) -> None:
        """`timeout` is the longest time of a request in seconds; 0: there is no limit."""
        self._async_llm = async_llm
        self._timeout = timeout
        self._deadlines: set[asyncio.Timeout] = set()  # of the requests that are being answered
        self._ended = False

    def end(self) -> None:
        """Answer all open requests with an error at once, and accept no more, because the server stops."""
        self._ended = True
        self._async_llm.refuse_requests()
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)

    def submit(
        self,
        inputs: Sequence[EncodedPrompt],
        params: SamplingParams,
        content: StreamContent,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[RequestStream]:
        """Submit all prompts, or none of them, and return the streams. Raises as `AsyncLLM.submit` does."""
        streams: list[RequestStream] = []
        try:
            for encoded in inputs:
                streams += self._async_llm.submit(encoded, params, content, speech_output)
        except OutriderError:
            self._async_llm.cancel(streams)
            raise
        return streams

    async def full_response(
        self,
        streams: Sequence[RequestStream],
        last_chunks: Coroutine[Any, Any, list[StreamChunk]],
        respond: Callable[[list[Completion]], Response],
        request: Request,
    ) -> Response:
        """Wait for the last chunks of all completions and return them in one response.

        Args:
            streams: the submitted requests. More may be added while `last_chunks` runs.
            last_chunks: waits for the end of all requests.
            respond: makes the response.
            request: the request of the client.
        """
        log_entry = entry_of(request.scope)
        disconnected = asyncio.create_task(self._cancel_on_disconnect(request, streams))
        finished = asyncio.create_task(last_chunks)
        tasks: list[asyncio.Task[Any]] = [finished, disconnected]
        log_entry.finish_reason = "canceled"  # replaced below, unless the client disconnects
        deadline = self._deadline()
        try:
            async with deadline:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            chunks = finished.result()
        except TimeoutError:
            limit = self._limit()
            log_entry.finish_reason = limit.finish_reason
            return _error(request, limit.message, kind=limit.kind, status=limit.status)
        finally:
            self._deadlines.discard(deadline)
            log_entry.output_tokens = sum(stream.num_tokens for stream in streams)
            log_entry.finish_early([stream.stats() for stream in streams])  # `finish` replaces it
            disconnected.cancel()
            finished.cancel()
            self._async_llm.cancel(streams)
        errors = [chunk.error for chunk in chunks if chunk.error]
        if errors:
            log_entry.finish_reason = "error"
            return _error(request, errors[0], kind="server_error", status=500)
        completions = [chunk.completion for chunk in chunks if chunk.completion]
        log_entry.finish(completions)
        return respond(completions)

    def stream_response(self, streams: Sequence[RequestStream], builder: ResponseBuilder, request: Request) -> Response:
        """Return a response that streams the chunks of all completions as server-sent events."""
        # The task starts here: the events are never read if the client disconnects before the first one.
        disconnected = asyncio.create_task(self._cancel_on_disconnect(request, streams))
        events = self._events(streams, builder, entry_of(request.scope), disconnected)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _events(
        self,
        streams: Sequence[RequestStream],
        builder: ResponseBuilder,
        log_entry: Entry,
        disconnected: asyncio.Task[None],
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of all completions."""
        log_entry.finish_reason = "canceled"  # replaced below, unless the client disconnects
        completions: dict[int, Completion] = {}  # by index of the stream
        chunk_builders = [ChunkBuilder(builder, index, stream.request) for index, stream in enumerate(streams)]
        deadline = self._deadline()
        try:
            async with deadline:
                async for index, chunks in _merge_streams(streams):
                    log_entry.add_tokens(sum(len(chunk.tokens) for chunk in chunks))
                    events = "".join(map(chunk_builders[index].events, chunks))
                    last = chunks[-1]  # only the last chunk has an error or the completion
                    if last.error:
                        log_entry.finish_reason = "canceled" if disconnected.done() else "error"
                        yield events
                        return
                    if last.completion:
                        completions[index] = last.completion
                    if len(completions) == len(streams):
                        ordered = [completions[i] for i in sorted(completions)]
                        log_entry.finish(ordered)
                        events += builder.stream_end(ordered)
                    yield events  # all events of a round together, so that they take one system call
        except TimeoutError:
            limit = self._limit()
            log_entry.finish_reason = limit.finish_reason
            yield builder.error(limit.message, kind=limit.kind)
        finally:
            if len(completions) < len(streams):
                log_entry.finish_early([stream.stats() for stream in streams])
            self._deadlines.discard(deadline)
            disconnected.cancel()
            self._async_llm.cancel(streams)

    def _deadline(self) -> asyncio.Timeout:
        """Return the timeout of a request, which `end` moves to the present."""
        deadline = asyncio.timeout(0.0 if self._ended else self._timeout or None)
        self._deadlines.add(deadline)
        return deadline

    def _limit(self) -> _Limit:
        """Return what has ended a request whose deadline has passed."""
        if self._ended:
            return _Limit("shutdown", STOPPED, kind="server_error", status=503)
        message = f"the request took longer than {self._timeout:g} seconds; ask for fewer tokens"
        return _Limit("timeout", message, kind="timeout_error", status=504)

    async def _cancel_on_disconnect(self, request: Request, streams: Sequence[RequestStream]) -> None:
        """Wait until the client disconnects, and cancel its requests."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._async_llm.cancel(streams)


async def last_chunks(streams: Sequence[RequestStream], log_entry: Entry) -> list[StreamChunk]:
    """Wait for the end of all streams, and return the last chunk of each."""
    return await asyncio.gather(*(last_chunk(stream, log_entry) for stream in streams))


async def last_chunk(stream: RequestStream, log_entry: Entry) -> StreamChunk:
    """Wait for the end of a stream, and return its last chunk."""
    async for chunks in stream.chunks():
        for chunk in chunks:
            log_entry.add_tokens(len(chunk.tokens))
    return chunk


def _chunks_of(stream: RequestStream) -> AsyncIterator[list[StreamChunk]]:
    """Return the chunks of a stream, smoothed with `--smooth`."""
    if stream.content is StreamContent.TOKENS:
        return smooth_chunks(stream.chunks(), asyncio.get_running_loop())
    return stream.chunks()


async def _merge_streams(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[StreamChunk]]]:
    """Yield the index of a stream and its new chunks as they arrive."""
    if len(streams) == 1:
        async for chunks in _chunks_of(streams[0]):
            yield 0, chunks
        return
    arrived: asyncio.Queue[tuple[int, list[StreamChunk]]] = asyncio.Queue(maxsize=len(streams))

    async def read(index: int, stream: RequestStream) -> None:
        async for chunks in _chunks_of(stream):
            await arrived.put((index, chunks))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, chunks = await arrived.get()
            yield index, chunks
            if chunks[-1].last:
                num_open -= 1
    finally:
        for reader in readers:
            reader.cancel()


def _error(request: Request, message: str, *, kind: str, status: int) -> Response:
    """Return an error response in the API of a request."""
    if status == 503:
        return in_api_of(request.url.path, retry_response(message))
    return in_api_of(request.url.path, JSONResponse(error_response(message, kind=kind), status))
