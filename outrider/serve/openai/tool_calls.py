"""Parses function calls from generated text, incrementally."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

_BEGIN, _END = "<tool_call>", "}\n</tool_call>"
_HEAD = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')


@dataclass(slots=True, kw_only=True)
class ParsedCall:
    """A function call, possibly incomplete."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")
    arguments: str = ""

    def whole(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits a growing text into content and function calls."""

    def __init__(self) -> None:
        self.made: list[ParsedCall] = []
        self._left = ""  # held back, because it may be part of a marker
        self._open = False  # inside of a call
        self._named = False  # the name of the call is known

    def read(self, text: str, *, last: bool) -> dict[str, Any]:
        """Add text and return the `delta` of a stream: content, tool_calls, both or none."""
        self._left += text
        said, parts = "", dict[int, dict[str, Any]]()
        before = -1
        while before != len(self._left):
            before = len(self._left)
            if not self._open:
                said += self._said(last)
            elif not self._named:
                self._name(parts)
            else:
                self._argue(parts)
        delta: dict[str, Any] = {"content": said} if said else {}
        return delta | ({"tool_calls": list(parts.values())} if parts else {})

    def _said(self, last: bool) -> str:
        text, mark, rest = self._left.partition(_BEGIN)
        held = 0 if mark or last else _held(text, _BEGIN)
        self._open, self._left = bool(mark), rest if mark else text[len(text) - held :]
        # Ignore the line break between two calls.
        return "" if self.made else text[: len(text) - held]

    def _name(self, parts: dict[int, dict[str, Any]]) -> None:
        if found := _HEAD.match(self._left):
            call, self._left, self._named = ParsedCall(name=found[1]), self._left[found.end() :], True
            self.made.append(call)
            parts[len(self.made) - 1] = {"index": len(self.made) - 1} | call.whole()

    def _argue(self, parts: dict[int, dict[str, Any]]) -> None:
        text, mark, rest = self._left.partition(_END)
        held = 0 if mark else _held(text, _END)
        more, at = text[: len(text) - held], len(self.made) - 1
        if more:
            self.made[at].arguments += more
            part = parts.setdefault(at, {"index": at, "function": {"arguments": ""}})
            part["function"]["arguments"] += more
        self._open, self._named, self._left = not mark, not mark, rest if mark else text[len(text) - held :]


def _held(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that may start `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
