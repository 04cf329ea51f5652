"""Carry HTTP requests to an ASGI application in another process, and stream the response."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from outrider.serve.monitoring.request_log import entry_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """A whole HTTP request."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    prefix: tuple[int, ...] = ()  # hashes of the blocks of its prompt, see `prefix_blocks`


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStart:
    """Status and headers of a response. The parts of its body follow."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


class ResponsePart(NamedTuple):
    """A part of the body, and how many tokens the request has used so far."""

    body: bytes
    prompt_tokens: int  # 0 before the last completion of the request has ended
    output_tokens: int


async def respond(app: ASGIApp, request: HTTPRequest) -> AsyncIterator[ResponseStart | ResponsePart]:
    """Run an application for a request. Yield the start of the response, then the parts of its body.

    The application has the middleware `RequestLog`, which counts tokens. Leaving the loop tells the
    application that the client has disconnected.
    """
    messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    unread = True
    scope = _scope(request)

    async def receive() -> MutableMapping[str, Any]:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": request.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            await messages.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
                yield ResponseStart(status=message["status"], headers=headers)
            elif body := message.get("body", b""):
                entry = entry_of(scope)
                yield ResponsePart(bytes(body), entry.prompt_tokens, entry.output_tokens)
        await task
    finally:
        disconnected.set()
        if not task.done():
            await asyncio.wait([task], timeout=1.0)
            task.cancel()


def _scope(request: HTTPRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
    }
