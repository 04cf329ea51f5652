"""ASGI middleware that checks API keys and the size of request bodies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.openai.responses import error_response

_PUBLIC_PATHS = frozenset({"/health", "/"})  # paths that need no API key


class ApiKeyMiddleware:
    """Rejects requests without a valid API key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._key_digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PUBLIC_PATHS or self._has_key(dict(scope["headers"])):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
        response = JSONResponse(error_response(message, kind="authentication_error"), 401)
        await response(scope, receive, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the headers contain one of the API keys."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip())
        # Compare with every key in constant time, so that the time of a response reveals nothing about the keys.
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Rejects bodies larger than a limit, with or without a Content-Length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = dict(scope["headers"]).get(b"content-length", b"0")
        fits = content_length.isdigit() and int(content_length) <= self._max_bytes
        body = bytearray()
        more_body = True
        while fits and more_body:  # read the whole body, so that a large one is rejected before it is parsed
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more_body = message.get("more_body", False)
            fits = len(body) <= self._max_bytes
        if not fits:
            response = JSONResponse(
                error_response(f"the request is larger than {self._max_bytes} bytes; send a smaller one"), 413
            )
            await response(scope, receive, send)
            return
        await self._app(scope, _replay(bytes(body), receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body that has been read already, and then calls `receive`."""
    replayed = False

    async def receive_body_first() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
