"""The FastAPI application: routes and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from outrider._version import __version__
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.handler import RequestHandler
from outrider.serve.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from outrider.serve.monitoring.metrics import EngineMetrics, exposition
from outrider.serve.monitoring.request_log import RequestLog
from outrider.serve.openai.errors import RESPONSES, STREAMED, add_handlers
from outrider.serve.openai.responses import problem
from outrider.serve.openai.schema import ChatRequest, CompletionRequest, TokenizeRequest
from outrider.serve.settings import Settings

_PAGE = Path(__file__).parent / "page.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def make_app(driver: AsyncLLM, settings: Settings, *, name: str) -> FastAPI:
    """Make the application. It starts and stops the driver."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        driver.stop()

    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan)
    driver.clocks.registry.register(EngineMetrics(driver))
    _add_routes(app, RequestHandler(driver, settings, name=name), driver, name)
    add_handlers(app)
    app.add_middleware(BodyLimitMiddleware, most=1024 * settings.max_body_kb)
    if settings.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_key)
    if settings.allow_origin:  # before the key check: browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog)
    return app


def _add_routes(app: FastAPI, answers: RequestHandler, driver: AsyncLLM, name: str) -> None:
    @app.post("/v1/completions", responses=STREAMED)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await answers.answer(asked, request)

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await answers.answer(asked, request)

    @app.get("/v1/models", responses=RESPONSES)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, driver)]}

    @app.get("/v1/models/{model:path}", responses=RESPONSES)
    async def model(model: str) -> dict[str, Any]:
        answers.check_model(model)
        return _model(name, driver)

    @app.post("/tokenize", responses=RESPONSES)
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        answers.check_model(asked.model)
        tokens = await driver.reader.encode(asked.prompt)
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": driver.front.parts.context}

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health", responses=RESPONSES)
    async def health() -> Response:
        if ill := driver.failure:
            return JSONResponse(problem(ill, kind="server_error"), 503)
        if lost := driver.degraded:  # degraded is not a reason to restart: 200
            return JSONResponse({"status": "degraded", "reasons": list(lost)})
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=RESPONSES)
    async def metrics() -> Response:
        return Response(exposition(driver), media_type="text/plain; version=0.0.4")


def _model(name: str, driver: AsyncLLM) -> dict[str, Any]:
    parts = driver.front.parts
    own = {"max_model_len": parts.context, "proposers": list(parts.proposers), "verifiers": list(parts.verifiers)}
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"} | own
