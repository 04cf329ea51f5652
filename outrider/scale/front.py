"""The HTTP front of the replicas: it forwards requests, and repeats those that a lost replica had not answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider._version import __version__
from outrider.scale.bridge import HTTPRequest, ResponseStart
from outrider.scale.metrics import sum_metrics
from outrider.scale.package import lost_actor_errors
from outrider.scale.prefixes import prefix_blocks
from outrider.serve.api_keys import ApiKey
from outrider.serve.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from outrider.serve.openai.responses import error_response
from outrider.serve.settings import Settings

_ATTEMPTS = 5
_RETRY_SECONDS = 0.2  # before the next attempt, so that Ray Serve notices the loss
_BROADCAST_SECONDS = 5.0  # for the answers of all replicas
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
_log = logging.getLogger("outrider.scale")


class Front:
    """Forwards requests to the replicas through Ray Serve's request router."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        """Forward to a deployment handle of `Replica`."""
        self._engine = engine
        self._settings = settings
        self._lost = lost_actor_errors()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Ray Serve calls this in the replica of the front."""
        app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/{path:path}", self.forward, methods=_METHODS)
        settings = self._settings
        app.add_middleware(BodyLimitMiddleware, max_bytes=1024 * settings.max_body_kb)
        if settings.api_key:
            app.add_middleware(ApiKeyMiddleware, keys=[ApiKey.of(key) for key in settings.api_key])
        if settings.allow_origin:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )
        return app

    async def metrics(self) -> Response:
        """Return the metrics of all replicas, summed."""
        return Response(sum_metrics(dict(await self._ask("metrics"))), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """Return whether a replica works."""
        states = await self._ask("state")
        working = [degraded for failure, degraded in states if not failure]
        if not working:
            return JSONResponse(error_response("no replica works", kind="server_error"), 503)
        reasons = [reason for degraded in working for reason in degraded]
        status = "degraded" if reasons or len(working) < len(states) else "ok"
        return JSONResponse({"status": status, "replicas": len(working), "reasons": reasons})

    async def _ask(self, method: str) -> list[Any]:
        """Return the results of a method of all replicas that answer."""
        response = self._engine.broadcast(method)
        results = await response.results_async(timeout_s=_BROADCAST_SECONDS, return_exceptions=True)
        return [result for result in results if not isinstance(result, BaseException)]

    async def forward(self, request: Request) -> Response:
        """Return the response of a replica. A request whose replica is lost before it answers goes to another one."""
        body = await request.body()
        forwarded = HTTPRequest(
            method=request.method,
            path=request.scope["path"],
            query=request.scope["query_string"],
            headers=tuple(request.headers.raw),
            body=body,
            prefix=prefix_blocks(body) if request.method == "POST" else (),
        )
        for attempt in range(_ATTEMPTS):
            parts = self._engine.options(stream=True).respond.remote(forwarded)
            try:
                return await self._response(parts)
            except self._lost as error:
                _log.warning("a replica was lost before it answered (attempt %d): %s", attempt + 1, _line(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except BaseException:
                parts.cancel()
                raise
        message = f"{_ATTEMPTS} replicas were lost while they worked on this request; send it again later"
        return JSONResponse(error_response(message, kind="server_error"), 503)

    async def _response(self, parts: Any) -> Response:
        """Wait for the first part of the body. Until then nothing has been sent, so the request can be repeated."""
        start = await anext(parts)
        assert isinstance(start, ResponseStart)
        first = await anext(parts, b"")
        response = StreamingResponse(self._body(first, parts), status_code=start.status)
        response.raw_headers = list(start.headers)
        if not start.is_event_stream:  # a document is sent when it is complete
            rest = [part async for part in parts]
            response = StreamingResponse(_once(b"".join([first, *rest])), status_code=start.status)
            response.raw_headers = list(start.headers)
        return response

    async def _body(self, first: bytes, parts: Any) -> AsyncIterator[bytes]:
        """Yield the body of a stream. If the replica is lost, end it with an error event."""
        try:
            yield first
            async for part in parts:
                yield part
        except self._lost as error:
            _log.warning("a replica was lost in the middle of a stream: %s", _line(error))
            message = "the replica that generated this stream was lost; send the request again"
            yield f"data: {json.dumps(error_response(message, kind='server_error'))}\n\n".encode()
        finally:
            parts.cancel()


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
