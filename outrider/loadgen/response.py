"""What became of a request, from the bytes of its answer and when they came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TOLD = 300  # characters of an answer that is no answer


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What became of one request; seconds since the load began."""

    number: int  # of the request
    start: float
    times: list[float] = field(default_factory=list)  # when pieces of text came
    text: str = ""
    tokens: int = 0
    finish: str = ""
    cancelled: bool = False  # the client hung up, as it was meant to
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether it was answered to the end."""
        return not self.cancelled and not self.error

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.start

    @property
    def e2e(self) -> float:
        """Seconds to the last piece."""
        return self.times[-1] - self.start

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between tokens: those of a piece come at once."""
        return self.chunk_gaps + [0.0] * (self.tokens - len(self.times))

    @property
    def tpot(self) -> float:
        """Seconds a token behind the first piece, in the mean."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


class ResponseRecorder:
    """Chunks of a stream as they came: reading them can wait, and must not make the client late for others."""

    def __init__(self) -> None:
        self._chunks: list[tuple[float, bytes]] = []
        self.pieces = 0  # at least so many have come

    def add(self, at: float, chunk: bytes) -> None:
        """Keep a chunk that came at second `at`."""
        self._chunks.append((at, chunk))
        self.pieces += chunk.count(b"data:")

    def play(self, asked: RequestResult) -> None:
        """Note all that it holds."""
        parts = []
        for at, event in self._events():
            if "error" in event:
                asked.error = str(event["error"])[:TOLD]
            for choice in event.get("choices", ()):
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    parts.append(text)
                    asked.times.append(at)
                asked.finish = choice.get("finish_reason") or asked.finish
            if event.get("usage"):
                asked.tokens = event["usage"]["completion_tokens"]
        asked.text = "".join(parts)
        asked.tokens = asked.tokens or len(asked.times)  # where no usage is told, a piece counts as a token

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        rest = b""
        for at, chunk in self._chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield at, json.loads(data)
