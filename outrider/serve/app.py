"""The routes, and what becomes of mistakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from outrider import __version__
from outrider.errors import OutriderError
from outrider.serve.answers import Answers
from outrider.serve.driver import Driver, QueueFull
from outrider.serve.guards import BodyLimit, Keys
from outrider.serve.metrics import EngineCounts, exposition
from outrider.serve.replies import problem
from outrider.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest, field_of
from outrider.serve.settings import Settings

_PAGE = Path(__file__).parent / "page.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_LATER = {"Retry-After": "1"}


def make_app(driver: Driver, settings: Settings, *, name: str) -> FastAPI:
    """The application, which starts the driver and stops it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        driver.stop()

    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan)
    driver.clocks.registry.register(EngineCounts(driver))
    _add_routes(app, Answers(driver, settings, name=name), driver, name)
    _add_handlers(app)
    app.add_middleware(BodyLimit, most=1024 * settings.body_kb)
    if settings.api_key:
        app.add_middleware(Keys, keys=settings.api_key)
    return app


def _add_routes(app: FastAPI, answers: Answers, driver: Driver, name: str) -> None:
    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await answers.completion(asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await answers.chat(asked, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        answers.check_model(model)
        return _model(name)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        answers.check_model(asked.model)
        tokens = driver.front.encode(asked.prompt)
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": driver.front.house.context}

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(driver), media_type="text/plain; version=0.0.4")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}


def _add_handlers(app: FastAPI) -> None:
    handlers: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        RequestValidationError: _invalid,
        QueueFull: lambda error: JSONResponse(problem(str(error), kind="overloaded_error"), 429, _LATER),
        OutriderError: lambda error: JSONResponse(problem(str(error)), 400),
        HTTPException: lambda error: JSONResponse(problem(str(error.detail)), error.status_code),
    }

    def add(kind: type[Exception], answer: Callable[[Any], JSONResponse]) -> None:
        async def handle(_: Request, error: Exception) -> JSONResponse:
            return answer(error)

        app.add_exception_handler(kind, handle)

    for kind, answer in handlers.items():
        add(kind, answer)


def _invalid(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    field = field_of(first["loc"])
    return JSONResponse(problem(f"{field or 'the request'}: {first['msg']}", field=field), 400)
