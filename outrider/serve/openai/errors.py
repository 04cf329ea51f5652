"""Mistakes: what clients are told of them, and how the OpenAPI document describes that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.serve.async_llm import QueueFull
from outrider.serve.openai.responses import problem
from outrider.serve.openai.schema import SamplingFields, field_of

_LATER = {"Retry-After": "1"}


class UnknownModel(InvalidParam):
    """Another model than the one that is served."""


@contextmanager
def about(param: str) -> Iterator[None]:
    """What is refused in here is this parameter, where nobody says better."""
    try:
        yield
    except (InvalidParam, QueueFull):
        raise
    except OutriderError as error:
        raise InvalidParam(param, str(error)) from error


@contextmanager
def rename_param(asked: SamplingFields) -> Iterator[None]:
    """What is refused in here is named as the client has named it."""
    try:
        yield
    except InvalidParam as error:
        said, name = str(error), asked.param_name(error.param)
        if said.startswith(f"{error.param} "):
            said = name + said[len(error.param) :]
        raise InvalidParam(name, said) from error


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Problem(BaseModel):
    """An answer that is none."""

    error: ErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "A mistake in the request, which the message names."},
    "5XX": {"model": Problem, "description": "A mistake in the server, or a limit on time."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "OpenAI's object, or where a stream was asked for its parts.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
    **RESPONSES,
}


def add_handlers(app: FastAPI) -> None:
    """Answer what routes raise."""
    handlers: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        RequestValidationError: _invalid,
        QueueFull: lambda error: JSONResponse(problem(str(error), kind="overloaded_error"), 429, _LATER),
        UnknownModel: lambda error: JSONResponse(problem(str(error), field=error.param), 404),
        InvalidParam: lambda error: JSONResponse(problem(str(error), field=error.param), 400),
        OutriderError: lambda error: JSONResponse(problem(str(error)), 400),
        Exception: lambda _: JSONResponse(problem("the server failed; its log says why", kind="server_error"), 500),
        HTTPException: lambda error: JSONResponse(problem(str(error.detail)), error.status_code, error.headers),
    }

    def add(kind: type[Exception], answer: Callable[[Any], JSONResponse]) -> None:
        async def handle(_: Request, error: Exception) -> JSONResponse:
            return answer(error)

        app.add_exception_handler(kind, handle)

    for kind, answer in handlers.items():
        add(kind, answer)


def _invalid(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        said = first.get("ctx", {}).get("error", first["msg"])
        return JSONResponse(problem(f"the request is no JSON: {said}"), 400)
    field = field_of(first)
    return JSONResponse(problem(f"{field or 'the request'}: {first['msg']}", field=field), 400)
