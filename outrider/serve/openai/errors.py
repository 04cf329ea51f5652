"""Error responses, their description in the OpenAPI document, and routes that only say what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from outrider.core.params import InvalidParam
from outrider.core.validation import mistake
from outrider.errors import Fault, OutriderError
from outrider.serve.anthropic.errors import in_api_of
from outrider.serve.errors import QueueFull, ServerStops
from outrider.serve.openai.responses import error_response, retry_response
from outrider.serve.openai.schema import field_of

_NO_OBJECT = ("missing", "dict_type", "model_type", "model_attributes_type")  # pydantic's errors of a whole body
_ROUTE_ERRORS = {  # the words of Starlette and FastAPI
    "There was an error parsing the body": "the request is not JSON in UTF-8; send such text",
    "Not Found": "there is no such route; /docs lists all routes",
    "Method Not Allowed": "this route does not take this method; /docs lists the methods of all routes",
}


class UnknownName(InvalidParam):
    """The request names something that does not exist. The status is 404."""


class UnknownModel(UnknownName):
    """The request names a model that is not served."""


@contextmanager
def attribute_errors(param: str) -> Iterator[None]:
    """Turn an `OutriderError` of the block into an `InvalidParam` of this parameter."""
    try:
        yield
    except (InvalidParam, QueueFull, Fault):
        raise
    except OutriderError as error:
        raise InvalidParam(param, str(error)) from error


class _Renames(Protocol):
    """A body that knows its field of each parameter."""

    def param_name(self, param: str) -> str: ...


@contextmanager
def rename_param(body: _Renames) -> Iterator[None]:
    """Replace the parameter of an `InvalidParam` by the field of the request that sets it."""
    try:
        yield
    except InvalidParam as error:
        message = str(error)
        field = body.param_name(error.param)
        if message.startswith((f"{error.param} ", f"{error.param}:")):
            message = field + message[len(error.param) :]
        raise InvalidParam(field, message) from error


class ErrorBody(BaseModel):
    """An error of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of an error response."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """An error of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """The body of an error response of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is invalid. The message says why."},
    "5XX": {"model": ErrorResponse, "description": "The server failed, or the request timed out."},
}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response, or the chunks of a stream.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
    **RESPONSES,
}
MESSAGE_ERRORS = {status: {**each, "model": AnthropicErrorResponse} for status, each in RESPONSES.items()}
MESSAGE_RESPONSES = STREAM_RESPONSES | MESSAGE_ERRORS


def add_handlers(app: FastAPI) -> None:
    """Install handlers that turn exceptions into error responses."""
    responses: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        RequestValidationError: _validation_response,
        QueueFull: lambda error: retry_response(str(error), kind="overloaded_error", status=429),
        ServerStops: lambda error: retry_response(str(error)),
        UnknownName: lambda error: JSONResponse(error_response(str(error), field=error.param), 404),
        InvalidParam: lambda error: JSONResponse(error_response(str(error), field=error.param), 400),
        OutriderError: lambda error: JSONResponse(error_response(str(error)), 400),
        Fault: lambda error: JSONResponse(error_response(str(error), kind="server_error"), 500),
        Exception: lambda _: JSONResponse(error_response("the server failed; see its log", kind="server_error"), 500),
        HTTPException: _http_response,
    }

    def add(kind: type[Exception], make_response: Callable[[Any], JSONResponse]) -> None:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            return in_api_of(request.url.path, make_response(error))

        app.add_exception_handler(kind, handle)

    for kind, make_response in responses.items():
        add(kind, make_response)


def _http_response(error: HTTPException) -> JSONResponse:
    """Return the response to an exception of a route, or of a request that has no route."""
    message = _ROUTE_ERRORS.get(error.detail, error.detail)
    return JSONResponse(error_response(message), error.status_code, error.headers)


def _validation_response(error: RequestValidationError) -> JSONResponse:
    """Return the response to a body that pydantic has rejected. It reports the first error."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return JSONResponse(error_response(f"the request is not valid JSON: {reason}; send a JSON object"), 400)
    field = field_of(first)
    if field is None and first["type"] in _NO_OBJECT:
        message = "the request is no JSON object; send one, with the header Content-Type: application/json"
        return JSONResponse(error_response(message), 400)
    return JSONResponse(error_response(f"{field or 'the request'}: {mistake(first)}", field=field), 400)


_CHAT = "send the conversation to /v1/chat/completions"
_TEXT_ONLY = "send the request to another server, since this one only generates text"
_MISSING = {  # path: what to do
    "/v1/threads": _CHAT,
    "/v1/assistants": _CHAT,
    "/v1/embeddings": _TEXT_ONLY,
    "/v1/moderations": _TEXT_ONLY,
    "/v1/rerank": _TEXT_ONLY,
    "/v1/images/generations": _TEXT_ONLY,
    "/v1/audio/speech": _TEXT_ONLY,
    "/v1/files": "send each request by itself",
    "/v1/batches": "send each request by itself",
}


def add_missing_routes(app: FastAPI) -> None:
    """Add routes that say that they are not supported, and what to do."""
    for path, advice in _MISSING.items():
        _add(app, path, f"{path} is not supported; {advice}")


def _add(app: FastAPI, path: str, message: str) -> None:
    async def refuse() -> NoReturn:
        raise HTTPException(404, message)

    app.add_api_route(path, refuse, methods=["GET", "POST"], include_in_schema=False, response_model=None)
