"""Parses function calls from generated text, incrementally."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from outrider.serve.openai.call_formats import CallFormat
from outrider.serve.openai.param_rules import is_text, json_value
from outrider.serve.openai.reasoning import partial_marker_length


@dataclass(slots=True, kw_only=True)
class ParsedCall:
    """A function call, possibly incomplete."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class JsonEnd:
    """Finds the end of a JSON value whose text comes in parts."""

    def __init__(self) -> None:
        self._depth = 0  # open objects and arrays
        self._in_string = False
        self._escaped = False  # whether the next character belongs to an escape
        self._started = False

    def find(self, text: str) -> int | None:
        """Add text and return where in it the value ends; None: the value goes on."""
        for i, char in enumerate(text):
            if self._in_string:
                self._add_to_string(char)
                if not self._in_string and not self._depth:
                    return i + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[" and (self._depth or not self._started):
                self._depth += 1
            elif not self._depth and char in "{}[](),<\n":  # what follows a number, true, false or null
                return i
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
            self._started = True
        return None

    def _add_to_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class ToolCallParser:
    """Splits generated text into content and function calls. The parts in which the text comes do not matter."""

    def __init__(
        self,
        format: CallFormat,
        functions: Mapping[str, Mapping[str, Any] | None] | None = None,
        *,
        required: bool = False,
    ) -> None:
        """Parse the calls of a format. The grammar of the request has enforced it.

        `functions` are the schemas of the arguments, by the names of the functions. With `required`,
        there is no content: text outside of a call is a marker that the end of the output has cut.
        """
        self._required = required
        self._functions = functions or {}
        self._key = ""  # of the argument that is being parsed, if they are written one by one
        self.calls: list[ParsedCall] = []
        self._format = format
        self._buffer = ""  # text that is not parsed yet, because it may end with a part of a marker
        self._last = False
        self._parse = self._parse_start if format.at_start else self._parse_content
        self._json_end = JsonEnd()
        self._deltas: list[dict[str, Any]] = []  # what `add_text` returns

    def add_text(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Add text and return the deltas of a stream, in order. Each has content, then tool_calls, or one of them."""
        self._buffer += text
        self._last = last
        self._deltas = []
        while self._parse():
            pass
        return self._deltas

    # Each of these parses one part, sets what parses the next one, and returns whether the buffer may hold more.

    def _parse_start(self) -> bool:
        heads = list(map(self._format.head, self._functions))
        if not self._last and self._may_begin(*heads):
            return False
        starts = self._buffer.startswith(tuple(heads)) and self._skip(self._format.trigger)
        self._parse = self._parse_name if starts else self._parse_rest
        return True

    def _parse_rest(self) -> bool:
        self._add_content(self._buffer)
        self._buffer = ""
        return False

    def _parse_content(self) -> bool:
        trigger = self._format.trigger
        text, found, rest = self._buffer.partition(trigger)
        held = 0 if found or self._last else partial_marker_length(text, trigger)
        self._add_content(text[: len(text) - held])
        self._buffer = rest if found else text[len(text) - held :]
        if found:
            self._parse = self._parse_name
        return bool(found)

    def _parse_name(self) -> bool:
        start, middle, rest = self._buffer.partition(self._format.middle)
        if not middle:
            return False
        call = ParsedCall(name=start.removeprefix(self._format.open))
        if self._format.short_ids:
            call.id = call.id[-9:]
        self._call_deltas().append({"index": len(self.calls)} | call.to_openai())
        self.calls.append(call)
        self._buffer = rest
        self._json_end = JsonEnd()
        self._parse = self._parse_first if self._format.param else self._parse_arguments
        return True

    def _parse_first(self) -> bool:
        self._add_arguments("{")
        self._parse = self._parse_param
        return True

    def _parse_param(self) -> bool:
        param = self._format.param
        assert param is not None
        if self._may_begin(self._format.close, param.separator) and not self._last:
            return False
        if self._buffer.startswith(self._format.close):
            self._add_arguments("}")
            self._parse = self._parse_close
            return True
        start, middle, rest = self._buffer.partition(param.middle)
        if not middle:
            return False
        call = self.calls[-1]
        self._key = start.removeprefix(param.separator).removeprefix(param.open)
        self._add_arguments(("" if call.arguments == "{" else ", ") + json.dumps(self._key) + ": ")
        self._buffer = rest
        self._json_end = JsonEnd()
        is_string = param.text and is_text(self._functions.get(call.name), self._key)
        self._add_arguments('"' if is_string else "")
        self._parse = self._parse_string if is_string else self._parse_value
        return True

    def _parse_string(self) -> bool:
        """Parse a value that is written as it is. Returns whether its end was found."""
        close = self._format.param.close if self._format.param else ""
        text, found, rest = self._buffer.partition(close)
        held = 0 if found or self._last else partial_marker_length(text, close)
        self._add_arguments(json.dumps(text[: len(text) - held], ensure_ascii=False)[1:-1] + ('"' if found else ""))
        self._buffer = rest if found else text[len(text) - held :]
        self._parse = self._parse_param if found else self._parse_string
        return bool(found)

    def _parse_value(self) -> bool:
        """Parse a value once it is complete."""
        param = self._format.param
        assert param is not None
        end = self._buffer.find(param.close) if param.close else self._value_end()
        if end < 0:
            return False
        self._add_arguments(json_value(self._buffer[:end]))
        self._buffer = self._buffer[end + len(param.close) :]
        self._parse = self._parse_param
        return True

    def _value_end(self) -> int:
        end = JsonEnd().find(self._buffer)
        return -1 if end is None else end

    def _add_content(self, text: str) -> None:
        if not text or self._required:
            return
        if not self._deltas or "tool_calls" in self._deltas[-1]:
            self._deltas.append({"content": ""})
        self._deltas[-1]["content"] += text

    def _call_deltas(self) -> list[dict[str, Any]]:
        """Return the deltas of calls behind the last content."""
        if not self._deltas:
            self._deltas.append({})
        deltas: list[dict[str, Any]] = self._deltas[-1].setdefault("tool_calls", [])
        return deltas

    def _add_arguments(self, text: str) -> None:
        if text:
            index = len(self.calls) - 1
            self.calls[index].arguments += text
            deltas = self._call_deltas()
            if not deltas or deltas[-1]["index"] < index:
                deltas.append({"index": index, "function": {"arguments": ""}})
            deltas[-1]["function"]["arguments"] += text

    def _parse_arguments(self) -> bool:
        end = self._json_end.find(self._buffer)
        arguments = self._buffer[:end]
        self._buffer = self._buffer[len(arguments) :]
        self._add_arguments(arguments)
        if end is not None:
            self._parse = self._parse_close
        return end is not None

    def _parse_close(self) -> bool:
        close = self._format.close
        if len(self._buffer) < len(close):
            return False
        self._skip(close)
        self._parse = self._parse_separator
        return True

    def _parse_separator(self) -> bool:
        separator = self._format.separator
        if self._may_begin(separator or "", self._format.end) and not self._last:
            return False
        if separator and self._skip(separator):
            self._parse = self._parse_name
            return True
        self._skip(self._format.end)
        self._parse = self._parse_rest if self._format.at_start else self._parse_content
        return True

    def _may_begin(self, *markers: str) -> bool:
        """Return whether the buffer is a part of a marker, and may become one of them."""
        return any(marker != self._buffer and marker.startswith(self._buffer) for marker in markers if marker)

    def _skip(self, marker: str) -> bool:
        """Skip a marker at the beginning of the buffer. Returns whether it was there."""
        found = self._buffer.startswith(marker)
        self._buffer = self._buffer.removeprefix(marker)
        return found
