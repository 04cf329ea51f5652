"""Middleware: API keys and limits of the body size."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.openai.responses import problem

_OPEN = frozenset({"/health", "/"})  # paths without a key


class ApiKeyMiddleware:
    """Rejects requests without a valid API key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._known(dict(scope["headers"])):
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(problem("the API key is missing or wrong", kind="authentication_error"), 401)
        await answer(scope, receive, send)

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key.strip())
        # Compare with all keys, in constant time.
        found = [hmac.compare_digest(given, key) for key in self._keys]
        return kind.lower() == b"bearer" and any(found)


class BodyLimitMiddleware:
    """Rejects bodies larger than a limit, with or without a Content-Length."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._max_requests = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        body, more = bytearray(), told.isdigit() and int(told) <= self._max_requests
        fits = more
        while more and fits:  # read completely, so that it is rejected before it is parsed
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more, fits = message.get("more_body", False), len(body) <= self._max_requests
        if not fits:
            answer = JSONResponse(problem(f"the request is larger than {self._max_requests} bytes"), 413)
            await answer(scope, receive, send)
            return
        await self._app(scope, _again(bytes(body), receive), send)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays what was read already."""
    given = False

    async def first() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return first


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
