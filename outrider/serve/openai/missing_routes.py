"""Routes of OpenAI's and other APIs that clients may look for and this server lacks."""

from typing import NoReturn

from fastapi import FastAPI
from starlette.exceptions import HTTPException

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
