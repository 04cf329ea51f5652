"""ASGI middleware that checks API keys and the size of request bodies."""

from asyncio import CancelledError
from collections.abc import Callable, Sequence
from math import ceil

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.anthropic.errors import in_api_of
from outrider.serve.api_keys import ApiKey, find_key
from outrider.serve.errors import STOPPED
from outrider.serve.monitoring.request_log import RequestLog, entry_of
from outrider.serve.monitoring.tracing import TraceMiddleware, Tracer
from outrider.serve.openai.responses import error_response, retry_response
from outrider.serve.pages import PAGE_PATHS
from outrider.serve.settings import Settings

_PUBLIC_PATHS = PAGE_PATHS | {"/health"}  # paths that need no API key
_CHARGED_PATHS = frozenset(  # paths whose tokens count for a quota
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)


class ApiKeyMiddleware:
    """Rejects requests without a valid API key, and those of a key that has used its quota."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b""))
        key = find_key(self._keys, authorization)
        if key is None:
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY"
            response = JSONResponse(error_response(message, kind="authentication_error"), 401)
            await in_api_of(scope["path"], response)(scope, receive, send)
            return
        entry = entry_of(scope)
        entry.key_name = key.name
        quota = key.quota if scope["path"] in _CHARGED_PATHS else None
        if quota and (message := key.busy_message()):
            wait = {"Retry-After": str(ceil(quota.wait_seconds()))}
            response = JSONResponse(error_response(message, kind="rate_limit_error"), 429, wait)
            await in_api_of(scope["path"], response)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if quota:
                quota.charge(entry.prompt_tokens + entry.output_tokens)


class ShutdownMiddleware:
    """Answers requests that uvicorn cancels because they have not ended in time when the server stops."""

    def __init__(self, app: ASGIApp, stops: Callable[[], bool]) -> None:
        """`stops` returns whether the server stops."""
        self._app = app
        self._stops = stops

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except CancelledError:
            if not self._stops():
                raise
            if not started:  # the task ends here in either case, and uvicorn would log a traceback
                await in_api_of(scope["path"], retry_response(STOPPED))(scope, receive, send)


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
            await in_api_of(scope["path"], response)(scope, receive, send)
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


def add_middleware(
    app: FastAPI,
    settings: Settings,
    keys: Sequence[ApiKey],
    tracer: Tracer | None = None,
    stops: Callable[[], bool] = lambda: False,
) -> None:
    """Add the middleware that every server has. Middleware that is added later runs earlier."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=1024 * settings.max_body_kb)
    if tracer:
        app.add_middleware(TraceMiddleware, tracer=tracer)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    if settings.allow_origin:  # runs before the key check, because browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after", "x-outrider-unused-fields"],
        )
    app.add_middleware(ShutdownMiddleware, stops=stops)
    app.add_middleware(RequestLog)
