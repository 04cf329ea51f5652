"""Carry HTTP requests to an ASGI application in another process, and stream the response."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from outrider.serve.monitoring.request_log import entry_of

_PART_BYTES = 1 << 20  # of a part of a body, at most: gRPC does not carry more than 4 MiB in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """A whole HTTP request."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    prefix: tuple[int, ...] = ()  # hashes of the blocks of its prompt, see `prefix_blocks`


class ResponsePart(NamedTuple):
    """A part of the body, and how many tokens the request has used so far."""

    body: bytes
    prompt_tokens: int  # 0 before the last completion of the request has ended
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStart:
    """Status and headers of a response, and the first part of its body. The other parts follow."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    first: ResponsePart

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


async def respond(app: ASGIApp, request: HTTPRequest) -> AsyncIterator[ResponseStart | ResponsePart]:
    """Run an application for a request. Yield the start of the response, then the other parts of its body.

    Each part costs a message between processes. So the start has the first part, and what the application has sent
    meanwhile is one part, of at most `_PART_BYTES`. The application has the middleware `RequestLog`, which counts
    tokens. Leaving the loop tells the application that the client has disconnected.
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
        start: MutableMapping[str, Any] | None = None
        ended = False
        while not ended:
            sent = [await messages.get()]
            while not messages.empty():
                sent.append(messages.get_nowait())
            ended = sent[-1] is None
            if sent[0] is not None and sent[0]["type"] == "http.response.start":
                start = sent[0]
            body = b"".join(message.get("body", b"") for message in sent if message is not None)
            entry = entry_of(scope)
            for at in range(0, len(body), _PART_BYTES):
                part = ResponsePart(body[at : at + _PART_BYTES], entry.prompt_tokens, entry.output_tokens)
                yield part if start is None else _start(start, part)
                start = None
        await task
        if start is not None:  # the body is empty
            yield _start(start, ResponsePart(b"", entry.prompt_tokens, entry.output_tokens))
    finally:
        disconnected.set()
        if not task.done():
            await asyncio.wait([task], timeout=1.0)
            task.cancel()


def _start(message: MutableMapping[str, Any], first: ResponsePart) -> ResponseStart:
    headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
    return ResponseStart(status=message["status"], headers=headers, first=first)


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
