"""The FastAPI application: routes and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from outrider._version import __version__
from outrider.errors import OutriderError
from outrider.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from outrider.serve.api_keys import all_keys
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.completer import Completer
from outrider.serve.handler import RequestHandler
from outrider.serve.items.schema import ResponsesRequest
from outrider.serve.middleware import add_middleware
from outrider.serve.monitoring.metrics import EngineMetrics, VLLMMetrics, exposition
from outrider.serve.monitoring.tracing import Tracer
from outrider.serve.openai.errors import (
    MESSAGE_ERRORS,
    MESSAGE_RESPONSES,
    RESPONSES,
    STREAM_RESPONSES,
    add_handlers,
    add_missing_routes,
    attribute_errors,
)
from outrider.serve.openai.responses import error_response
from outrider.serve.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.serve.openai.template_options import reads_thinking
from outrider.serve.pages import add_pages
from outrider.serve.settings import Settings
from outrider.serve.speech.routes import add_audio_routes, add_missing_audio_routes
from outrider.serve.speech.transcriber import Transcriber
from outrider.serve.videos.routes import add_missing_video_routes, add_video_routes
from outrider.serve.weight_routes import add_weight_routes, weight_root

if TYPE_CHECKING:
    from outrider.serve.videos.service import VideoService


def make_app(
    async_llm: AsyncLLM,
    settings: Settings,
    *,
    name: str,
    videos: VideoService | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return the application. It starts `async_llm` and `videos` at startup and stops them at shutdown.

    Its `state.end_requests()` answers all open requests with an error at once.

    Args:
        async_llm: the engine with its thread.
        settings: the options of `outrider serve`.
        name: model name in the API.
        videos: what makes videos; None: the server makes none.
        tracer: makes OpenTelemetry traces; None: there are none.

    Raises:
        OutriderError: the video models have the same name, or a package that the target needs is
            missing.
    """
    if videos is not None and videos.served.name == name:
        raise OutriderError(f"target and video models are both named {name!r}; give another --served-model-name")

    lifespan = partial(_lifespan, async_llm, videos, tracer)
    # FastAPI's own pages of the API load their scripts from the internet.
    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    async_llm.latency.registry.register(EngineMetrics(async_llm))
    if settings.vllm_metrics:
        async_llm.latency.registry.register(VLLMMetrics(async_llm, name))
    completer = Completer(async_llm, settings.request_timeout)
    app.state.end_requests = completer.end
    handler = RequestHandler(async_llm, completer, settings, name=name)
    add_pages(app)
    _add_routes(app, handler, async_llm, name, videos)
    _add_text_routes(app, handler)
    _add_token_routes(app, handler, async_llm)
    if async_llm.codec.speech_rules is not None:
        add_audio_routes(app, Transcriber(async_llm, completer), handler.check_model)
    else:
        add_missing_audio_routes(app)
    if videos is None:
        add_missing_video_routes(app)
    else:
        add_video_routes(app, videos)
    if settings.weight_updates is not None:
        add_weight_routes(app, async_llm, weight_root(settings.weight_updates))
    add_missing_routes(app)
    add_handlers(app)
    async_llm.tracer = tracer
    add_middleware(app, settings, all_keys(settings), tracer, stops=lambda: async_llm.stopping)
    return app


@asynccontextmanager
async def _lifespan(
    async_llm: AsyncLLM, videos: VideoService | None, tracer: Tracer | None, _: FastAPI
) -> AsyncIterator[None]:
    async_llm.start()
    if videos is not None:
        videos.start()
    yield
    if videos is not None:
        videos.stop()
    async_llm.stop()
    if tracer:
        tracer.close()


def _add_text_routes(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/completions", responses=STREAM_RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        return await handler.handle(body, request)

    @app.post("/v1/chat/completions", responses=STREAM_RESPONSES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await handler.handle(body, request)

    @app.post("/v1/responses", responses=STREAM_RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer in a conversation of items."""
        return await handler.handle(body, request)

    @app.post("/v1/messages", responses=MESSAGE_RESPONSES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer in a conversation, in the format of Anthropic's API."""
        return await handler.handle(body, request)

    @app.post("/v1/messages/count_tokens", responses=MESSAGE_ERRORS)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Return the number of tokens of a conversation."""
        return {"input_tokens": await handler.count_tokens(body)}


def _add_routes(
    app: FastAPI, handler: RequestHandler, async_llm: AsyncLLM, name: str, videos: VideoService | None
) -> None:
    @app.get("/v1/models", responses=RESPONSES)
    async def models() -> dict[str, Any]:
        """Return the models."""
        video_models = [] if videos is None else [videos.served.to_json()]
        return {"object": "list", "data": [_model(name, async_llm), *video_models]}

    @app.get("/v1/models/{model:path}", responses=RESPONSES)
    async def model(model: str) -> dict[str, Any]:
        """Return a model."""
        if videos is not None and model == videos.served.name:
            return videos.served.to_json()
        handler.check_model(model)
        return _model(name, async_llm)

    @app.get("/health", responses=RESPONSES)
    async def health() -> Response:
        """Return whether the server works."""
        if failure := async_llm.failure:
            return JSONResponse(error_response(failure, kind="server_error"), 503)
        if reasons := async_llm.degraded:  # status 200, because a degraded server need not be restarted
            return JSONResponse({"status": "degraded", "reasons": list(reasons)})
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=RESPONSES)
    async def metrics() -> Response:
        """Return the metrics, in the text format of Prometheus."""
        return Response(exposition(async_llm), media_type="text/plain; version=0.0.4")


def _add_token_routes(app: FastAPI, handler: RequestHandler, async_llm: AsyncLLM) -> None:
    @app.post("/tokenize", responses=RESPONSES)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a text."""
        handler.check_model(body.model)
        tokens = await async_llm.prompt_encoder.encode(body.prompt)
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": async_llm.parts.context}

    @app.post("/detokenize", responses=RESPONSES)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids, without special tokens."""
        handler.check_model(body.model)
        with attribute_errors("tokens"):
            return {"prompt": async_llm.codec.decode(body.tokens)}


def _model(name: str, async_llm: AsyncLLM) -> dict[str, Any]:
    """Return the model object of OpenAI's API, with Outrider's extensions."""
    parts = async_llm.parts
    codec = async_llm.codec
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": parts.context,
        "input": codec.input_kind,
        "enable_thinking": reads_thinking(codec.chat_template),
        "proposers": list(parts.proposers),
        "verifiers": list(parts.verifiers),
        "verifier": {
            "name": parts.verifier.name,
            "exact": parts.verifier.exact,
            "bound": parts.verifier.bound and parts.verifier.bound.as_dict(),
        },
    }
