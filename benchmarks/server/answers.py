"""Joins the events of a stream, in any API of `outrider serve`, so that two streams of one answer can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Fields whose values a stream adds up. Of all others the last value counts.
_JOINED = frozenset(
    [
        "content",
        "reasoning_content",
        "arguments",
        "text",
        "delta",
        "thinking",
        "partial_json",
        "token_ids",
        "finish_reason",
    ]
)
# Fields that differ between two answers to one request, or with the prefix cache.
_OWN = frozenset(
    [
        "id",
        "item_id",
        "call_id",
        "created",
        "created_at",
        "speculation",
        "cached_tokens",
        "input_tokens",
        "cache_read_input_tokens",
    ]
)
_REPEATED = ("", "content_block_delta")  # names of events of which an answer may have any number
_ENDS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


class Malformed(ValueError):
    """A stream has an error, or does not have the form of its API."""


@dataclass(slots=True)
class Answer:
    """What the events of a stream add up to."""

    fields: dict[str, Any] = field(default_factory=dict)  # by place in the events
    types: list[str] = field(default_factory=list)  # of the events that do not repeat

    def find(self, *names: str) -> Any:
        """Return the last value of a field with one of these names; None if there is none."""
        return next((value for place, value in reversed(self.fields.items()) if _name(place) in names), None)

    def begins(self, other: Answer) -> bool:
        """Return whether an answer that was cut is the beginning of another one."""
        joined = [(place, value) for place, value in self.fields.items() if _name(place) in _JOINED]
        return all(place in other.fields and other.fields[place][: len(value)] == value for place, value in joined)


def read_stream(raw: bytes, *, cut: bool) -> Answer:
    """Return what a stream adds up to. `cut`: the client has left before its end.

    Raises:
        Malformed: it has an error, no end, an event after its end, or other tokens than its usage.
    """
    *events, rest = raw.decode(errors="replace").split("\n\n")
    answer = Answer()
    for number, event in enumerate(events):
        head, _, data = event.partition("data: ")
        name = "[DONE]" if data == "[DONE]" else head.strip().removeprefix("event: ")
        document = {} if name == "[DONE]" else json.loads(data)
        if name == "error" or document.get("error") or document.pop("sequence_number", number) != number:
            raise Malformed(f"event {number} is {event[:200]}")
        if name not in _REPEATED and not name.endswith(".delta"):
            answer.types.append(name)
        for place, value in _leaves(document, document.pop("type", "")):
            joins = _name(place) in _JOINED and place in answer.fields
            answer.fields[place] = answer.fields[place] + value if joins else value
    ends = [each for each in answer.types if each in _ENDS]
    if not cut and (rest or len(ends) != 1 or name != ends[0]):
        raise Malformed(f"the stream has the ends {ends}, and ends with {events[-1:]}{rest}")
    tokens = answer.find("token_ids")
    if not cut and tokens is not None and len(tokens) != answer.find("completion_tokens"):
        raise Malformed(f"the stream has {len(tokens)} tokens, its usage {answer.find('completion_tokens')}")
    return answer


def _name(place: str) -> str:
    return place.rpartition(".")[2]


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each part of an event. Objects with an index are at it."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in _OWN:
                yield from _leaves(each, f"{place}.{value.get('index', value.get('output_index', ''))}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, each in enumerate(value):
            yield from _leaves(each, place if "index" in each else f"{place}.{i}")
    elif value is not None:
        yield place, value
