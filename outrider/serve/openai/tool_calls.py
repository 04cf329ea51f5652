"""Parses function calls from generated text, incrementally."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from outrider.core.markers import CALL_END, CALL_START

_BODY_END = "}\n" + CALL_END
_CALL_NAME = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')


@dataclass(slots=True, kw_only=True)
class ParsedCall:
    """A function call, possibly incomplete."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits generated text into content and function calls."""

    def __init__(self) -> None:
        self.calls: list[ParsedCall] = []
        self._buffer = ""  # text that is not parsed yet, because it may end with a part of a marker
        self._in_call = False
        self._has_name = False  # whether the name of the current call is parsed

    def add_text(self, text: str, *, last: bool) -> dict[str, Any]:
        """Add text and return the `delta` of a stream: content, tool_calls, both or none."""
        self._buffer += text
        content = ""
        call_deltas: dict[int, dict[str, Any]] = {}  # by index of the call
        length_before = -1
        while length_before != len(self._buffer):
            length_before = len(self._buffer)
            if not self._in_call:
                content += self._parse_content(last)
            elif not self._has_name:
                self._parse_name(call_deltas)
            else:
                self._parse_arguments(call_deltas)
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | ({"tool_calls": list(call_deltas.values())} if call_deltas else {})

    def _parse_content(self, last: bool) -> str:
        text, marker, rest = self._buffer.partition(CALL_START)
        num_held = 0 if marker or last else _partial_marker_length(text, CALL_START)
        end = len(text) - num_held
        self._in_call = bool(marker)
        self._buffer = rest if marker else text[end:]
        # Ignore the line break between two calls.
        return "" if self.calls else text[:end]

    def _parse_name(self, call_deltas: dict[int, dict[str, Any]]) -> None:
        if match := _CALL_NAME.match(self._buffer):
            call = ParsedCall(name=match[1])
            index = len(self.calls)
            self._buffer = self._buffer[match.end() :]
            self._has_name = True
            self.calls.append(call)
            call_deltas[index] = {"index": index} | call.to_openai()

    def _parse_arguments(self, call_deltas: dict[int, dict[str, Any]]) -> None:
        text, marker, rest = self._buffer.partition(_BODY_END)
        num_held = 0 if marker else _partial_marker_length(text, _BODY_END)
        end = len(text) - num_held
        index = len(self.calls) - 1
        if arguments := text[:end]:
            self.calls[index].arguments += arguments
            call_delta = call_deltas.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call_delta["function"]["arguments"] += arguments
        self._in_call = not marker
        self._has_name = not marker
        self._buffer = rest if marker else text[end:]


def _partial_marker_length(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may be the start of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)
