"""From a request to its answer, in one piece or as a stream; whoever hangs up gives the slot back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.errors import OutriderError
from outrider.llm import Prompt
from outrider.params import SamplingParams
from outrider.serve.driver import Driver
from outrider.serve.replies import Reply, problem
from outrider.serve.schema import ChatRequest, CompletionRequest, Sampling
from outrider.serve.settings import Settings
from outrider.serve.smooth import smoothed
from outrider.serve.ticket import Piece, Ticket, Watch
from outrider.types import Completion

_LOOK = 0.1  # seconds between two looks at whether a client is still there
_GONE = 499  # who asked has hung up, so nobody reads it


class Answers:
    """Hands requests to the driver, and writes down what comes back."""

    def __init__(self, driver: Driver, settings: Settings, *, name: str) -> None:
        self._driver, self._settings, self._name = driver, settings, name

    def check_model(self, model: str | None) -> None:
        """Raises HTTPException 404 for any other model than the one that is served."""
        if model not in (None, self._name):
            raise HTTPException(404, f"model {model!r} is not served here; use {self._name!r}")

    async def completion(self, asked: CompletionRequest, request: Request) -> Response:
        prompts = asked.prompts()
        if not prompts:
            raise OutriderError("prompt is an empty list; give at least one prompt")
        params = asked.params(most=asked.max_tokens, logprobs=asked.logprobs, scope=asked.user or "")
        return await self._answer(asked, prompts, params, request)

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        turns = [{"role": turn.role, "content": turn.text()} for turn in asked.messages]
        params = asked.params(most=asked.most(), logprobs=asked.wanted(), scope=asked.user or "")
        return await self._answer(asked, [self._driver.front.chat(turns)], params, request)

    async def _answer(
        self, asked: Sampling, prompts: Sequence[Prompt], params: SamplingParams, request: Request
    ) -> Response:
        self.check_model(asked.model)
        if asked.stream_options and not asked.stream:
            raise OutriderError("stream_options are for streams; set stream, or leave them out")
        if len(prompts) * params.n > self._settings.most_n:
            raise OutriderError(
                f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} completions; ask for at most"
                f" {self._settings.most_n} at once"
            )
        watch = asked.watch()
        if watch is Watch.TEXT and self._settings.smooth:
            watch = Watch.WORDS
        reply = Reply(
            chat=isinstance(asked, ChatRequest),
            model=self._name,
            decode=self._driver.front.decode,
            logprobs=params.logprobs is not None,
            tokens=watch >= Watch.ROUNDS,
            spell=self._driver.spell,
        )
        tickets = self._submit(prompts, params, watch)
        if asked.stream:
            tell = asked.stream_options is not None and asked.stream_options.include_usage
            stream = self._stream(reply, tickets, len(prompts), tell=tell)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(reply, tickets, len(prompts), request)

    def _submit(self, prompts: Sequence[Prompt], params: SamplingParams, watch: Watch) -> list[Ticket]:
        """All of them or none."""
        tickets: list[Ticket] = []
        try:
            for prompt in prompts:
                tickets += self._driver.submit(prompt, params, watch)
        except OutriderError:
            self._driver.cancel(tickets)
            raise
        return tickets

    async def _whole(self, reply: Reply, tickets: Sequence[Ticket], prompts: int, request: Request) -> Response:
        work = asyncio.gather(*map(_end, tickets))
        try:
            async with asyncio.timeout(self._settings.timeout or None):
                while not (await asyncio.wait([work], timeout=_LOOK))[0]:
                    if await request.is_disconnected():
                        return Response(status_code=_GONE)
                ends = work.result()
        except TimeoutError:
            return JSONResponse(problem(self._late(), kind="timeout_error"), 504)
        finally:
            work.cancel()
            self._driver.cancel(tickets)
        if error := next((end.error for end in ends if end.error), ""):
            return JSONResponse(problem(error, kind="server_error"), 500)
        return JSONResponse(reply.whole([_completion(end) for end in ends], prompts))

    async def _stream(self, reply: Reply, tickets: Sequence[Ticket], prompts: int, *, tell: bool) -> AsyncIterator[str]:
        ends: dict[int, Completion] = {}
        begun: set[int] = set()
        try:
            async with asyncio.timeout(self._settings.timeout or None):
                async for index, pieces in _merged(tickets):
                    events = list[str]()
                    for piece in pieces:
                        if piece.text or not piece.error:
                            events.append(_event(reply.part(index, piece, first=index not in begun)))
                            begun.add(index)
                        if piece.error:
                            yield "".join(events) + _event(problem(piece.error, kind="server_error"))
                            return
                        if piece.completion:
                            ends[index] = piece.completion
                    if len(ends) == len(tickets):
                        events += [_event(reply.last([ends[i] for i in sorted(ends)], prompts))] if tell else []
                        events.append("data: [DONE]\n\n")
                    yield "".join(events)  # in one call to the system
        except TimeoutError:
            yield _event(problem(self._late(), kind="timeout_error"))
        finally:
            self._driver.cancel(tickets)

    def _late(self) -> str:
        return f"the request took longer than {self._settings.timeout:g} seconds"


async def _end(ticket: Ticket) -> Piece:
    """The last piece of a completion."""
    return [pieces async for pieces in ticket.pieces()][-1][-1]


def _pieces(ticket: Ticket) -> AsyncIterator[list[Piece]]:
    return smoothed(ticket.pieces(), asyncio.get_running_loop()) if ticket.watch is Watch.WORDS else ticket.pieces()


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """The pieces of several completions as they come."""
    if len(tickets) == 1:
        async for pieces in _pieces(tickets[0]):
            yield 0, pieces
        return
    ready: asyncio.Queue[tuple[int, list[Piece]]] = asyncio.Queue(maxsize=len(tickets))

    async def read(index: int, ticket: Ticket) -> None:
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


def _completion(end: Piece) -> Completion:
    assert end.completion is not None
    return end.completion


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
