"""Handles HTTP requests: whole responses, streams, and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.types import Completion
from outrider.errors import OutriderError
from outrider.llm import Prompt
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.monitoring.request_log import Entry, entry_of
from outrider.serve.openai.errors import UnknownModel, about, rename_param
from outrider.serve.openai.responses import ChunkBuilder, ResponseBuilder, problem
from outrider.serve.openai.schema import ChatRequest, CompletionRequest, SamplingFields
from outrider.serve.openai.tools import Tools, conversation, knows_calls
from outrider.serve.settings import Settings
from outrider.serve.stream.smoothing import smoothed
from outrider.serve.stream.ticket import RequestStream, StreamChunk, StreamContent

_GONE = 499  # nginx's status for a closed connection; nobody receives it


class RequestHandler:
    """Submits requests to the driver and builds the responses."""

    def __init__(self, driver: AsyncLLM, settings: Settings, *, name: str) -> None:
        self._driver, self._settings, self._name = driver, settings, name
        self._compiling = asyncio.Lock()

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel if the request names another model."""
        if model not in (None, self._name):
            raise UnknownModel("model", f"model {model!r} is not served here; use {self._name!r}")

    async def answer(self, asked: CompletionRequest | ChatRequest, request: Request) -> Response:
        """Respond to a request. Raises InvalidParam or QueueFull."""
        self.check_model(asked.model)
        with rename_param(asked):
            return await (
                self._chat(asked, request) if isinstance(asked, ChatRequest) else self._completion(asked, request)
            )

    async def _completion(self, asked: CompletionRequest, request: Request) -> Response:
        prompts = asked.prompts()
        if not prompts:
            raise InvalidParam("prompt", "prompt is an empty list; give at least one prompt")
        with about("constraint"):
            constraint = asked.constraint()
        params = asked.params(
            most=asked.max_tokens, logprobs=asked.logprobs, scope=asked.user or "", constraint=constraint
        )
        return await self._answer(asked, prompts, params, request)

    async def _chat(self, asked: ChatRequest, request: Request) -> Response:
        front, tools = self._driver.front, Tools.of(asked)
        with about("constraint"):
            constraint = asked.constraint()
        if tools and constraint:
            said = "tools say what form calls have; leave response_format and structured_outputs out"
            raise InvalidParam("structured_outputs" if asked.structured_outputs else "response_format", said)
        known = knows_calls(str(front.parts.tokenizer.chat_template or ""))
        with about("messages"):
            turns = conversation(asked.messages, tools, known=known)
        with about("tools"):
            calls = tools.constraint() if tools else None
        params = asked.params(
            most=asked.max_output_tokens(),
            logprobs=asked.num_logprobs(),
            scope=asked.user or "",
            constraint=calls or constraint,
        )
        with about("messages"):
            prompt = await self._driver.reader.chat(turns, tools.described() if tools and known else None)
        return await self._answer(asked, [prompt], params, request, calls=tools is not None)

    async def _answer(
        self,
        asked: SamplingFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request: Request,
        *,
        calls: bool = False,
    ) -> Response:
        if asked.stream_options and not asked.stream:
            raise InvalidParam("stream_options", "stream_options are for streams; set stream, or leave them out")
        if len(prompts) * params.n > self._settings.max_n:
            raise InvalidParam(
                "n" if params.n > 1 else "prompt",
                f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} completions; ask for at most"
                f" {self._settings.max_n} at once",
            )
        if params.constraint:
            async with self._compiling:  # in a thread, one at a time: it may take seconds
                with about("constraint"):
                    await asyncio.to_thread(self._driver.front.prepare, params.constraint)
        watch = asked.stream_content()
        if watch is StreamContent.TEXT and self._settings.smooth:
            watch = StreamContent.TOKENS
        reply = ResponseBuilder(
            chat=isinstance(asked, ChatRequest),
            model=self._name,
            decode=self._driver.front.decode,
            logprobs=params.logprobs is not None,
            tokens=watch >= StreamContent.ROUNDS,
            spell=self._driver.spell,
            calls=calls,
        )
        tokens = [await self._driver.reader.encode(prompt) for prompt in prompts]
        tickets = self._submit(tokens, params, watch)
        gone = asyncio.create_task(self._watch(request, tickets))
        if asked.stream:
            tell = asked.stream_options is not None and asked.stream_options.include_usage
            stream = self._stream(reply, tickets, len(prompts), tell=tell, request=request, gone=gone)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(reply, tickets, len(prompts), request=request, gone=gone)

    async def _watch(self, request: Request, tickets: Sequence[RequestStream]) -> None:
        """Cancel the requests when the client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._driver.cancel(tickets)

    def _submit(self, prompts: Sequence[Prompt], params: SamplingParams, watch: StreamContent) -> list[RequestStream]:
        """Submit all prompts, or none of them."""
        tickets: list[RequestStream] = []
        try:
            for prompt in prompts:
                tickets += self._driver.submit(prompt, params, watch)
        except OutriderError:
            self._driver.cancel(tickets)
            raise
        return tickets

    async def _whole(
        self,
        reply: ResponseBuilder,
        tickets: Sequence[RequestStream],
        prompts: int,
        *,
        request: Request,
        gone: asyncio.Task[None],
    ) -> Response:
        entry = entry_of(request.scope)
        work = asyncio.create_task(_ends(tickets, entry))
        either: list[asyncio.Task[Any]] = [work, gone]
        entry.finish = "cancelled"
        try:
            async with asyncio.timeout(self._settings.request_timeout or None):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=_GONE)
            ends = work.result()
        except TimeoutError:
            entry.finish = "timeout"
            return JSONResponse(problem(self._late(), kind="timeout_error"), 504)
        finally:
            entry.tokens = sum(each.written for each in tickets)
            gone.cancel()
            work.cancel()
            self._driver.cancel(tickets)
        if error := next((end.error for end in ends if end.error), ""):
            entry.finish = "error"
            return JSONResponse(problem(error, kind="server_error"), 500)
        completions = [_completion(end) for end in ends]
        entry.end(completions)
        return JSONResponse(reply.response(completions, prompts))

    async def _stream(
        self,
        reply: ResponseBuilder,
        tickets: Sequence[RequestStream],
        prompts: int,
        *,
        tell: bool,
        request: Request,
        gone: asyncio.Task[None],
    ) -> AsyncIterator[str]:
        entry = entry_of(request.scope)
        entry.finish = "cancelled"
        ends: dict[int, Completion] = {}
        parts = [reply.chunks(index) for index in range(len(tickets))]
        try:
            async with asyncio.timeout(self._settings.request_timeout or None):
                async for index, pieces in _merged(tickets):
                    events, end = _told(parts[index], pieces, entry), pieces[-1]
                    if end.error:
                        entry.finish = "cancelled" if gone.done() else "error"
                        yield events
                        return
                    if end.completion:
                        ends[index] = end.completion
                    if len(ends) == len(tickets):
                        entry.end([ends[i] for i in sorted(ends)])
                        events += _event(reply.usage_chunk(entry.completions, prompts)) if tell else ""
                        events += "data: [DONE]\n\n"
                    yield events  # in one system call
        except TimeoutError:
            entry.finish = "timeout"
            yield _event(problem(self._late(), kind="timeout_error"))
        finally:
            gone.cancel()
            self._driver.cancel(tickets)

    def _late(self) -> str:
        return f"the request took longer than {self._settings.request_timeout:g} seconds"


async def _ends(tickets: Sequence[RequestStream], entry: Entry) -> list[StreamChunk]:
    """Return the last chunks of several completions."""
    return await asyncio.gather(*(_end(each, entry) for each in tickets))


async def _end(ticket: RequestStream, entry: Entry) -> StreamChunk:
    """Return the last chunk of a completion."""
    async for pieces in ticket.chunks():
        for piece in pieces:
            entry.see(len(piece.tokens))
    return piece


def _pieces(ticket: RequestStream) -> AsyncIterator[list[StreamChunk]]:
    return (
        smoothed(ticket.chunks(), asyncio.get_running_loop())
        if ticket.watch is StreamContent.TOKENS
        else ticket.chunks()
    )


async def _merged(tickets: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[StreamChunk]]]:
    """Yield the chunks of several completions as they arrive."""
    if len(tickets) == 1:
        async for pieces in _pieces(tickets[0]):
            yield 0, pieces
        return
    ready: asyncio.Queue[tuple[int, list[StreamChunk]]] = asyncio.Queue(maxsize=len(tickets))

    async def read(index: int, ticket: RequestStream) -> None:
        async for pieces in _pieces(ticket):
            await ready.put((index, pieces))

    readers = [asyncio.create_task(read(i, ticket)) for i, ticket in enumerate(tickets)]
    try:
        left = len(tickets)
        while left:
            index, pieces = await ready.get()
            yield index, pieces
            left -= pieces[-1].last
    finally:
        for reader in readers:
            reader.cancel()


def _told(parts: ChunkBuilder, pieces: Sequence[StreamChunk], entry: Entry) -> str:
    """Return the events of some chunks of a completion. The last one may be an error."""
    events = []
    for piece in pieces:
        entry.see(len(piece.tokens))
        if piece.text or not piece.error:
            events.append(_event(parts.next(piece)))
        if piece.error:
            events.append(_event(problem(piece.error, kind="server_error")))
    return "".join(events)


def _completion(end: StreamChunk) -> Completion:
    assert end.completion is not None
    return end.completion


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
