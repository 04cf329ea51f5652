"""Records the response to a request, and computes latencies from the arrival times of its chunks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_ERROR_LENGTH = 300  # characters of an error response that are kept


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The result of one request. Times are in seconds since the start of the load test."""

    number: int  # of the request
    start: float
    times: list[float] = field(default_factory=list)  # arrival times of the chunks with text
    text: str = ""
    tokens: int = 0  # output tokens
    finish: str = ""  # finish reason
    retries: int = 0  # times that the request was sent again, because the server had closed its idle connection
    canceled: bool = False  # the client has canceled the request, as planned
    error: str = ""

    def count_retry(self) -> None:
        """Count that the request is sent again."""
        self.retries += 1

    @property
    def completed(self) -> bool:
        """Whether the response is complete."""
        return not self.canceled and not self.error

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.times[0] - self.start

    @property
    def e2e(self) -> float:
        """Seconds from the request to the last chunk."""
        return self.times[-1] - self.start

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between consecutive tokens. They are 0 between the tokens of one chunk."""
        return self.chunk_gaps + [0.0] * (self.tokens - len(self.times))

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first chunk, in seconds."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


class ResponseRecorder:
    """Records the raw chunks of a stream with their arrival times.

    The chunks are parsed after the end of the response, so that parsing does not delay other requests.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[float, bytes]] = []
        self.num_events = 0  # a lower bound, because a marker may be split between two chunks

    def add(self, seconds: float, chunk: bytes) -> None:
        """Record a chunk that has arrived at time `seconds`."""
        self._chunks.append((seconds, chunk))
        self.num_events += chunk.count(b"data:")

    def parse(self, result: RequestResult) -> None:
        """Parse the chunks and write text, times, tokens, finish reason and error to `result`."""
        texts = []
        for seconds, event in self._events():
            if "error" in event:
                result.error = str(event["error"])[:MAX_ERROR_LENGTH]
            for choice in event.get("choices", ()):
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    texts.append(text)
                    result.times.append(seconds)
                result.finish = choice.get("finish_reason") or result.finish
            if event.get("usage"):
                result.tokens = event["usage"]["completion_tokens"]
        result.text = "".join(texts)
        result.tokens = result.tokens or len(result.times)  # without usage, a chunk counts as one token

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield each event with the arrival time of its last byte."""
        incomplete_line = b""
        for seconds, chunk in self._chunks:
            *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield seconds, json.loads(data)
