"""Server-sent events, and answers as blocks of reasoning, text and calls, for APIs that have them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import uuid4

_Event = dict[str, Any]


class EventWriter:
    """Writes the events of a stream in the format of OpenAI's chats and completions."""

    needs_usage = False  # whether every stream needs a chunk with the usage

    def chunk(self, document: Mapping[str, Any]) -> str:
        """Return the events of a chunk."""
        return f"data: {json.dumps(document)}\n\n"

    def end(self) -> str:
        """Return the event after the last chunk."""
        return "data: [DONE]\n\n"

    def error(self, document: dict[str, Any]) -> str:
        """Return the event of an error, given as the body of an error response."""
        return self.chunk(document)

    def response(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole response, given as that of a chat or completion."""
        return document


class Kind(Enum):
    """The kind of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class Block:
    """A part of an answer. The text of a call is its arguments."""

    kind: Kind
    text: str = ""
    name: str = ""  # this and the next: of a call
    call_id: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)


class BlockWriter(EventWriter, ABC):
    """Writes a chat in the format of an API whose answers are blocks."""

    needs_usage = True

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.head: Mapping[str, Any] = {}  # id, model and time of the chat
        self.finish_reason = ""
        self.stop_string: str | None = None
        self.usage: dict[str, Any] = {}
        self._is_open = False  # the last block
        self._call = -1  # index of the last call

    def chunk(self, document: Mapping[str, Any]) -> str:
        events: list[_Event] = []
        if not self.head:
            self.head = document
            events += self.start()
        for choice in document["choices"]:
            for kind, text, call in _parts(choice["delta"]):
                events += self._add(kind, text, call)
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.stop_string = choice.get("stop_reason", self.stop_string)
        if "usage" in document:
            self.usage = document["usage"]
            events += self._close()
            events += self.finish()
        return "".join(map(self.write, events))

    def end(self) -> str:
        return ""

    def response(self, document: dict[str, Any]) -> dict[str, Any]:
        (choice,) = document["choices"]
        self.chunk(document | {"choices": [choice | {"delta": choice["message"]}]})
        return self.document()

    def write(self, event: _Event) -> str:
        """Return an event with its type as its name."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _add(self, kind: Kind, text: str, call: Mapping[str, Any]) -> Iterable[_Event]:
        events: list[_Event] = []
        is_next = kind is Kind.CALL and call["index"] > self._call
        if not self._is_open or is_next or self.blocks[-1].kind is not kind:
            events += self._close()
            name = call["function"]["name"] if call else ""
            self.blocks.append(Block(kind=kind, name=name, call_id=call.get("id", "")))
            self._call = call.get("index", self._call)
            self._is_open = True
            events += self.begin(self.blocks[-1])
        self.blocks[-1].text += text
        return [*events, self.add(self.blocks[-1], text)] if text else events

    def _close(self) -> Iterable[_Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return self.close(self.blocks[-1])

    @abstractmethod
    def start(self) -> Iterable[_Event]:
        """Return the events before the first block."""

    @abstractmethod
    def begin(self, block: Block) -> Iterable[_Event]:
        """Return the events that begin a block, which is the last one."""

    @abstractmethod
    def add(self, block: Block, text: str) -> _Event:
        """Return the event that adds text to the last block."""

    @abstractmethod
    def close(self, block: Block) -> Iterable[_Event]:
        """Return the events that end the last block."""

    @abstractmethod
    def finish(self) -> Iterable[_Event]:
        """Return the events at the end of the answer."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return the whole response."""


def _parts(delta: Mapping[str, Any]) -> Iterable[tuple[Kind, str, Mapping[str, Any]]]:
    """Yield the kind, the new text and the call of each part of a delta, or of a whole message."""
    if thought := delta.get("reasoning_content"):
        yield Kind.REASONING, thought, {}
    if content := delta.get("content"):
        yield Kind.TEXT, content, {}
    for index, call in enumerate(delta.get("tool_calls", ())):
        yield Kind.CALL, call["function"]["arguments"], {"index": index} | call
