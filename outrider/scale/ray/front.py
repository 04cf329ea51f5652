"""The HTTP front of the replicas: it forwards requests, and repeats those that a lost replica had not answered."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider._version import __version__
from outrider.scale.ray.bridge import HTTPRequest, ResponsePart, ResponseStart
from outrider.scale.ray.metrics import sum_metrics
from outrider.scale.ray.package import lost_actor_errors, no_replica_errors
from outrider.scale.ray.prefixes import prefix_blocks
from outrider.serve.api_keys import ApiKey
from outrider.serve.middleware import add_middleware
from outrider.serve.monitoring.request_log import Entry, configure_logging, entry_of
from outrider.serve.openai.responses import error_response
from outrider.serve.settings import Settings

_ATTEMPTS = 5
RETRY_SECONDS = 0.2  # before the next attempt, so that Ray Serve notices the loss
_BROADCAST_SECONDS = 5.0  # for the answers of all replicas
_GRPC_BYTES = 1 << 20  # of a body that gRPC carries; it refuses messages above 4 MiB
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
_ID_HEADER = b"x-request-id"  # `RequestLog` adds it to the response of the front
_FRONT_HEADERS = frozenset({b"authorization", _ID_HEADER})  # that are not forwarded
_log = logging.getLogger("outrider.scale.ray")


class Front:
    """Forwards requests to the replicas through Ray Serve's request router."""

    def __init__(self, engine: Any, settings: Settings, keys: Sequence[ApiKey]) -> None:
        """Forward to a deployment handle of `Replica` what clients with one of the keys send. No keys: all clients."""
        self._engine = engine
        self._settings = settings
        self._keys = keys
        self._lost = lost_actor_errors()
        self._no_replica = no_replica_errors()
        self._loaded = False  # whether a replica has answered so far
        # Ray's gRPC takes a fraction of the time of its object store for each part of a response.
        self._stream = engine.options(
            stream=True, _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._stream_large = engine.options(stream=True, _by_reference=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Ray Serve calls this in the replica of the front."""
        configure_logging(self._settings.log_format)
        app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/{path:path}", self.forward, methods=_METHODS)
        add_middleware(app, self._settings, self._keys)
        return app

    async def metrics(self) -> Response:
        """Return the metrics of all replicas, summed."""
        return Response(sum_metrics(dict(await self._ask("metrics"))), media_type="text/plain; version=0.0.4")

    async def health(self) -> Response:
        """Return whether a replica works, or whether the first one still loads."""
        states = await self._ask("state")
        self._loaded |= bool(states)
        if not self._loaded:
            return JSONResponse({"status": "loading", "replicas": 0, "reasons": []}, 503)
        working = [degraded for failure, degraded in states if not failure]
        if not working:
            return JSONResponse(error_response("no replica works", kind="server_error"), 503)
        reasons = [reason for degraded in working for reason in degraded]
        status = "degraded" if reasons or len(working) < len(states) else "ok"
        return JSONResponse({"status": status, "replicas": len(working), "reasons": reasons})

    async def _ask(self, method: str) -> list[Any]:
        """Return the results of a method of all replicas that answer; [] if there is none."""
        response = self._engine.broadcast(method)
        try:
            results = await response.results_async(timeout_s=_BROADCAST_SECONDS, return_exceptions=True)
        except self._no_replica:
            return []
        return [result for result in results if not isinstance(result, BaseException)]

    async def forward(self, request: Request) -> Response:
        """Return the response of a replica. A request whose replica is lost before it answers goes to another one."""
        body = await request.body()
        entry = entry_of(request.scope)
        headers = [(name, value) for name, value in request.headers.raw if name not in _FRONT_HEADERS]
        forwarded = HTTPRequest(
            method=request.method,
            path=request.scope["path"],
            query=request.scope["query_string"],
            headers=(*headers, (_ID_HEADER, entry.id.encode())),  # replicas log the same id
            body=body,
            prefix=prefix_blocks(body) if request.method == "POST" else (),
        )
        engine = self._stream if len(body) <= _GRPC_BYTES else self._stream_large
        for attempt in range(_ATTEMPTS):
            parts = engine.respond.remote(forwarded)
            try:
                return await self._response(parts, entry)
            except self._lost as error:
                _log.warning("a replica was lost before it answered (attempt %d): %s", attempt + 1, _line(error))
                await asyncio.sleep(RETRY_SECONDS)
            except BaseException:
                parts.cancel()
                raise
        message = f"{_ATTEMPTS} replicas were lost while they worked on this request; send it again later"
        return JSONResponse(error_response(message, kind="server_error"), 503)

    async def _response(self, parts: Any, entry: Entry) -> Response:
        """Wait for the first part of the body. Until then nothing has been sent, so the request can be repeated."""
        start = await anext(parts)
        assert isinstance(start, ResponseStart)
        bodies = _bodies(start.first, parts, entry)
        if start.is_event_stream:
            content = self._events(bodies, parts)
        else:  # a document is sent when it is complete
            content = _once(b"".join([body async for body in bodies]))
        response = StreamingResponse(content, status_code=start.status)
        response.raw_headers = [(name, value) for name, value in start.headers if name != _ID_HEADER]
        return response

    async def _events(self, bodies: AsyncIterator[bytes], parts: Any) -> AsyncIterator[bytes]:
        """Yield the body of a stream. If the replica is lost, end it with an error event."""
        try:
            async for body in bodies:
                yield body
        except self._lost as error:
            _log.warning("a replica was lost in the middle of a stream: %s", _line(error))
            message = "the replica that generated this stream was lost; send the request again"
            yield f"data: {json.dumps(error_response(message, kind='server_error'))}\n\n".encode()
        finally:
            parts.cancel()


async def _bodies(first: ResponsePart, parts: Any, entry: Entry) -> AsyncIterator[bytes]:
    """Yield the bodies of the parts of a response, and record the tokens, which count for the quota of a key."""
    entry.prompt_tokens, entry.output_tokens = first.prompt_tokens, first.output_tokens
    yield first.body
    async for part in parts:
        entry.prompt_tokens = part.prompt_tokens
        entry.output_tokens = part.output_tokens
        yield part.body


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
