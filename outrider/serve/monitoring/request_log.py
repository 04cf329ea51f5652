"""The request log: one line per request."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.types import Completion

_log = logging.getLogger("outrider.serve.requests")
_QUIET = frozenset({"/health", "/metrics"})  # polled by machines, so not logged
_HEADER, _LONGEST = b"x-request-id", 128
_ENTRY = "outrider.entry"  # key in the ASGI scope


@dataclass(slots=True, kw_only=True)
class Entry:
    """The log entry of one request."""

    id: str
    began: float = field(default_factory=perf_counter)
    first: float | None = None  # time of the first token
    tokens: int = 0  # output tokens of all completions
    finish: str = ""  # finish reason of the completions, or how the request ended otherwise
    completions: list[Completion] = field(default_factory=list)

    def see(self, tokens: int) -> None:
        """Count new tokens."""
        if tokens and self.first is None:
            self.first = perf_counter()
        self.tokens += tokens

    def end(self, completions: Sequence[Completion]) -> None:
        """Record the finished completions."""
        self.completions = list(completions)
        self.tokens = sum(len(each.token_ids) for each in completions)
        self.finish = "+".join(sorted({str(each.finish_reason) for each in completions}))

    def fields(self, scope: Scope, status: int) -> dict[str, Any]:
        """Return the fields of the log line."""
        fields: dict[str, Any] = {
            "id": self.id,
            "route": f"{scope['method']} {scope['path']}",
            "status": status,
            "seconds": round(perf_counter() - self.began, 6),
        }
        if not self.finish:
            return fields
        passes = sum(each.stats.passes for each in self.completions)
        written = sum(each.stats.output_tokens for each in self.completions)
        return fields | {
            "finish_reason": self.finish,
            "time_to_first_token_seconds": None if self.first is None else round(self.first - self.began, 6),
            "prompt_tokens": sum(len(each.prompt_token_ids) for each in self.completions),
            "output_tokens": self.tokens,
            "tau": round(written / passes, 4) if passes else None,
            "draft_tokens": sum(each.stats.draft_tokens for each in self.completions),
            "accepted_tokens": sum(sum(each.stats.accepted) for each in self.completions),
        }


class RequestLog:
    """Gives each request an id, which the response carries, and logs it at its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope[_ENTRY] = Entry(id=_name(dict(scope["headers"]).get(_HEADER, b"")))
        status = 500

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER, entry.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, tell)
        finally:
            if scope["path"] not in _QUIET:
                _log.info("request", extra={"fields": entry.fields(scope, status)})


def entry_of(scope: Scope) -> Entry:
    """Return the log entry of a request."""
    found = scope[_ENTRY]
    assert isinstance(found, Entry)
    return found


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class Lines(logging.Formatter):
    """Formats a record as text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return super().format(record) + "".join(f" {name}={value}" for name, value in fields.items())


def log_as(form: str) -> None:
    """Log to standard error, as text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _name(asked: bytes) -> str:
    """Return the X-Request-Id of the client if it is printable and short, else None."""
    name = asked.decode("latin-1")
    return name if 0 < len(name) <= _LONGEST and name.isascii() and name.isprintable() else uuid4().hex
