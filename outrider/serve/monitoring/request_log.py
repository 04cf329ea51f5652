"""The request log: one line per request."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, TextIO
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.stats import Stats
from outrider.core.types import Completion
from outrider.serve.pages import PARTS

_log = logging.getLogger("outrider.serve.requests")
_UNLOGGED_PATHS = frozenset({"/health", "/metrics"})  # polled by monitoring systems
_ID_HEADER = b"x-request-id"
_UNUSED_FIELDS_HEADER = b"x-outrider-unused-fields"
_MAX_ID_LENGTH = 128
_SCOPE_KEY = "outrider.entry"  # key of the entry in the ASGI scope


@dataclass(slots=True, kw_only=True)
class Entry:
    """The log entry of one request."""

    id: str
    key_name: str = ""  # of the API key; "": the key has no name
    start: float = field(default_factory=perf_counter)
    first_token: float | None = None  # time
    prompt_tokens: int = 0  # once per completion that has begun, known when the request ends
    output_tokens: int = 0  # of all completions
    finish_reason: str = ""  # of the completions, or how the request ended otherwise
    stats: Sequence[Stats] = ()  # of the completions that have begun
    unused_fields: list[str] = field(default_factory=list)  # of the body, which had no effect

    def add_tokens(self, count: int) -> None:
        """Count new output tokens."""
        if count and self.first_token is None:
            self.first_token = perf_counter()
        self.output_tokens += count

    def finish(self, completions: Sequence[Completion]) -> None:
        self.stats = [completion.stats for completion in completions]
        self.prompt_tokens = sum(completion.num_input_tokens for completion in completions)
        self.output_tokens = sum(len(completion.token_ids) for completion in completions)
        self.finish_reason = "+".join(sorted({str(completion.finish_reason) for completion in completions}))

    def finish_early(self, stats: Sequence[Stats]) -> None:
        """Set what the completions of a request have so far that is canceled or fails."""
        self.stats = stats
        self.prompt_tokens = sum(each.prompt_tokens for each in stats)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that the response has because of this entry."""
        headers = [(_ID_HEADER, self.id.encode())]
        if self.unused_fields:
            headers.append((_UNUSED_FIELDS_HEADER, ", ".join(self.unused_fields).encode()))
        return headers

    def fields(self, scope: Scope, status: int) -> dict[str, Any]:
        """Return the fields of the log line."""
        fields: dict[str, Any] = {
            "id": self.id,
            "route": f"{scope['method']} {scope['path']}",
            "status": status,
            "seconds": round(perf_counter() - self.start, 6),
        }
        if self.key_name:
            fields["key"] = self.key_name
        if self.unused_fields:
            fields["unused_fields"] = ",".join(self.unused_fields)
        if not self.finish_reason:  # the request did not reach the engine
            return fields
        passes = sum(each.passes for each in self.stats)
        tokens_of_passes = sum(each.output_tokens for each in self.stats)
        return fields | {
            "finish_reason": self.finish_reason,
            "time_to_first_token_seconds": (
                None if self.first_token is None else round(self.first_token - self.start, 6)
            ),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tau": round(tokens_of_passes / passes, 4) if passes else None,
            "draft_tokens": sum(each.draft_tokens for each in self.stats),
            "accepted_tokens": sum(sum(each.accepted) for each in self.stats),
        }


class RequestLog:
    """ASGI middleware that gives each request an id and logs the request at its end.

    The response has the id in its X-Request-Id header, and the fields of the request that had no
    effect in X-Outrider-Unused-Fields.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = Entry(id=_request_id(dict(scope["headers"]).get(_ID_HEADER, b"")))
        scope[_SCOPE_KEY] = entry
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *entry.headers()]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _UNLOGGED_PATHS and not scope["path"].startswith(PARTS):
                _log.info("request", extra={"fields": entry.fields(scope, status)})


def entry_of(scope: Scope) -> Entry:
    """Return the log entry of a request."""
    entry = scope[_SCOPE_KEY]
    assert isinstance(entry, Entry)
    return entry


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which prints above a progress bar while one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object on one line."""

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


class TextFormatter(logging.Formatter):
    """Formats a log record as text, followed by its fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return super().format(record) + "".join(f" {name}={value}" for name, value in fields.items())


def configure_logging(log_format: str) -> None:
    """Log to standard error. `log_format` is "text" or "json"."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _request_id(header: bytes) -> str:
    """Return the X-Request-Id of the client if it is short, printable ASCII; otherwise a new id."""
    id = header.decode("latin-1")
    usable = 0 < len(id) <= _MAX_ID_LENGTH and id.isascii() and id.isprintable()
    return id if usable else uuid4().hex
