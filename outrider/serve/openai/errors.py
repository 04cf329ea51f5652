"""Error responses and their description in the OpenAPI document."""

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
    """The request names a model that is not served."""


@contextmanager
def about(param: str) -> Iterator[None]:
    """Attribute an `OutriderError` of the block to a parameter."""
    try:
        yield
    except (InvalidParam, QueueFull):
        raise
    except OutriderError as error:
        raise InvalidParam(param, str(error)) from error


@contextmanager
def rename_param(asked: SamplingFields) -> Iterator[None]:
    """Name the parameter of an error as the client has named it."""
    try:
        yield
    except InvalidParam as error:
        said, name = str(error), asked.param_name(error.param)
        if said.startswith(f"{error.param} "):
            said = name + said[len(error.param) :]
        raise InvalidParam(name, said) from error


class ErrorBody(BaseModel):
    """An error of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class Problem(BaseModel):
    """The body of an error response."""

    error: ErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "The request is invalid. The message says why."},
    "5XX": {"model": Problem, "description": "The server failed, or the request timed out."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response, or the chunks of a stream.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
    **RESPONSES,
}


def add_handlers(app: FastAPI) -> None:
    """Install handlers that turn exceptions into error responses."""
    handlers: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        RequestValidationError: _invalid,
        QueueFull: lambda error: JSONResponse(problem(str(error), kind="overloaded_error"), 429, _LATER),
        UnknownModel: lambda error: JSONResponse(problem(str(error), field=error.param), 404),
        InvalidParam: lambda error: JSONResponse(problem(str(error), field=error.param), 400),
        OutriderError: lambda error: JSONResponse(problem(str(error)), 400),
        Exception: lambda _: JSONResponse(problem("the server failed; see its log", kind="server_error"), 500),
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
        return JSONResponse(problem(f"the request is not valid JSON: {said}"), 400)
    field = field_of(first)
    return JSONResponse(problem(f"{field or 'the request'}: {first['msg']}", field=field), 400)
