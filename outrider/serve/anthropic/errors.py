"""Errors in the form of the API of their route."""

import json
from typing import Any

from starlette.responses import JSONResponse

PATH = "/v1/messages"
_TYPES = {  # by status; 4XX: invalid_request_error, 5XX: api_error
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(document: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an error of OpenAI's API in the form of Anthropic's."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": document["error"]["message"]}}


def in_api_of(path: str, response: JSONResponse) -> JSONResponse:
    """Return an error response in the form of the API that the path belongs to."""
    if path != PATH and not path.startswith(PATH + "/"):
        return response
    document = anthropic_error(json.loads(bytes(response.body)), response.status_code)
    headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    return JSONResponse(document, response.status_code, headers)
