"""Sends requests to a server with OpenAI's API, and turns what goes wrong into one line that names the fix."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from outrider.core.packages import needed_by
from outrider.errors import OutriderError, either

if TYPE_CHECKING:  # aiohttp is an optional dependency
    from outrider.lab.client.connection import Connection

_MAX_ERROR = 300  # characters of an error response that are kept
_API = "/v1"


class Refused(OutriderError):
    """The server has answered a request with an HTTP error."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


def base_url(url: str) -> str:
    """Return the base URL of the API, which ends with /v1 unless the URL has another path.

    Raises:
        OutriderError: the URL has no scheme or no host.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OutriderError(f"{url!r} is not the URL of a server; use for example http://127.0.0.1:8000/v1")
    text = url.strip().rstrip("/")
    return text if parts.path.rstrip("/") else text + _API


class _Response(NamedTuple):
    status: int
    text: str

    @property
    def ok(self) -> bool:
        return self.status < 400


class Server:
    """One server, and the connections to it."""

    def __init__(self, http: Connection, url: str) -> None:
        self.http = http  # with the key and the timeout
        self.url = url  # base URL of the API

    @property
    def retries(self) -> int:
        """Times that a request was sent again, because the server had closed its idle connection."""
        return self.http.retries

    async def models(self) -> tuple[str, ...]:
        """Return the names of the models.

        Raises:
            OutriderError: the server cannot be reached, or it lists no model.
        """
        document = await self._get(f"{self.url}/models")
        entries = document.get("data") if isinstance(document, dict) else None
        names = tuple(str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry)
        if not names:
            raise OutriderError(f"{self.url} lists no model; check the URL, or give --model")
        return names

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a request and return the JSON document of the response.

        Raises:
            Refused: the response is an HTTP error.
            OutriderError: the server cannot be reached, or the response is no JSON object.
        """
        url = f"{self.url}/{path}"
        response = await self._request("POST", url, body)
        if not response.ok:
            raise Refused(url, response.status, _message(response.text))
        document = _parse(response.text)
        if not isinstance(document, dict):
            raise OutriderError(f"{url} answered no JSON object; check that the URL is that of an OpenAI API")
        return document

    async def metrics(self) -> str | None:
        """Return the text of /metrics beside the API, or None if the server has none.

        Raises:
            OutriderError: the server cannot be reached.
        """
        return await self._text_beside_api("metrics")

    async def speculates(self) -> bool | None:
        """Return what /slots of llama.cpp says: whether it was started with speculation. None: it does not say.

        Its metrics count 0 drafts both without speculation and before the first draft.

        Raises:
            OutriderError: the server cannot be reached.
        """
        text = await self._text_beside_api("slots")
        slots = None if text is None else _parse(text)
        if not isinstance(slots, list):
            return None
        states = [slot["speculative"] for slot in slots if isinstance(slot, dict) and "speculative" in slot]
        return any(states) if states else None

    async def _text_beside_api(self, path: str) -> str | None:
        """Return the text of a page beside the API, or None if the server has none."""
        response = await self._request("GET", f"{self.url.removesuffix(_API)}/{path}")
        return response.text if response.ok else None

    async def _get(self, url: str) -> Any:
        response = await self._request("GET", url)
        if response.status == 401:
            raise OutriderError(f"{url} answered 401; give the key of the server with --api-key")
        if not response.ok:
            raise OutriderError(f"{url} answered {response.status}; check the URL, which usually ends with /v1")
        return _parse(response.text)

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> _Response:
        from aiohttp import ClientError

        try:
            async with self.http.request(method, url, body) as response:
                return _Response(response.status, await response.text(errors="replace"))
        except (ClientError, TimeoutError, OSError) as error:
            raise _unreachable(url, error) from error


@asynccontextmanager
async def connect(url: str, *, api_key: str = "", timeout: float = 300.0) -> AsyncIterator[Server]:
    """Yield a connection to a server.

    Args:
        url: its base URL, with or without /v1.
        api_key: its key; "" is none.
        timeout: seconds until a request fails.

    Raises:
        OutriderError: the URL is invalid, or the HTTP client is not installed.
    """
    address = base_url(url)
    with needed_by("this", "serve"):
        from outrider.lab.client.connection import open_connection
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with open_connection(headers, timeout) as http:
        yield Server(http, address)


async def find_model(server: Server, name: str | None) -> str:
    """Return the name of the model to ask: `name`, or the first one that the server lists.

    Raises:
        OutriderError: the server cannot be reached, lists no model, or has no model of this name.
    """
    names = await server.models()
    if name is None:
        return names[0]
    if name not in names:
        raise OutriderError(f"{server.url} has no model {name!r}; use --model {either(names[:8])}")
    return name


def retries_text(count: int) -> str:
    """Return the sentence that says how many times a request was sent again."""
    return f"Requests sent again, because the server had closed their idle connections: {count}."


def _unreachable(url: str, error: BaseException) -> OutriderError:
    cause = getattr(error, "os_error", error)  # aiohttp's own text has the address as well
    reason = getattr(cause, "strerror", None) or str(error) or type(error).__name__
    return OutriderError(f"{url} cannot be reached ({reason}); check the URL, and that the server runs")


def _message(text: str) -> str:
    """Return the message of an error response."""
    document = _parse(text)
    if isinstance(document, dict):
        error = document.get("error", document.get("message", document.get("detail", text)))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:_MAX_ERROR]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
