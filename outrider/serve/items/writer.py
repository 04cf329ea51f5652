"""Writes answers in the format of OpenAI's Responses API."""

from collections.abc import Iterable, Mapping
from typing import Any

from outrider.serve.openai.blocks import Block, BlockWriter, Kind

_PREFIX = {Kind.REASONING: "rs_", Kind.TEXT: "msg_", Kind.CALL: "fc_"}
_PART = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text"}
_EVENT = {**_PART, Kind.CALL: "function_call_arguments"}


class ItemWriter(BlockWriter):
    """Writes a response, whole or as a stream."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Write a response that repeats these fields of its request."""
        super().__init__()
        self._fields = fields
        self._num_events = 0

    def write(self, event: dict[str, Any]) -> str:
        numbered = event | {"sequence_number": self._num_events}
        self._num_events += 1
        return super().write(numbered)

    def start(self) -> Iterable[dict[str, Any]]:
        return [{"type": f"response.{name}", "response": self.document()} for name in ("created", "in_progress")]

    def begin(self, block: Block) -> Iterable[dict[str, Any]]:
        empty = Block(kind=block.kind, name=block.name, call_id=block.call_id, id=block.id)
        item = _item(empty, "in_progress")
        item |= {"content": []} if block.kind in _PART else {}
        yield {"type": "response.output_item.added", "output_index": len(self.blocks) - 1, "item": item}
        if block.kind in _PART:
            yield self._at("content_part.added", block) | {"part": _part(empty)}

    def add(self, block: Block, text: str) -> dict[str, Any]:
        return self._at(f"{_EVENT[block.kind]}.delta", block) | _logprobs(block) | {"delta": text}

    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        field = "arguments" if block.kind is Kind.CALL else "text"
        name = {"name": block.name} if block.kind is Kind.CALL else {}
        yield self._at(f"{_EVENT[block.kind]}.done", block) | _logprobs(block) | name | {field: block.text}
        if block.kind in _PART:
            yield self._at("content_part.done", block) | {"part": _part(block)}
        item = _item(block, self._status(block))
        yield {"type": "response.output_item.done", "output_index": len(self.blocks) - 1, "item": item}

    def finish(self) -> Iterable[dict[str, Any]]:
        document = self.document()
        return [{"type": f"response.{document['status']}", "response": document}]

    def error(self, document: dict[str, Any]) -> str:
        error = document["error"]
        return self.write({"type": "error", "code": error["type"], "message": error["message"], "param": None})

    def document(self) -> dict[str, Any]:
        done = "incomplete" if self.finish_reason == "length" else "completed"
        status = done if self.usage else "in_progress"
        return {
            "id": "resp_" + self.head["id"].partition("-")[2],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.head["model"],
            "output": [_item(block, self._status(block)) for block in self.blocks],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "usage": _usage(self.usage) if self.usage else None,
            **self._fields,
        }

    def _at(self, name: str, block: Block) -> dict[str, Any]:
        """Return the fields of an event within a block."""
        place: dict[str, Any] = {"output_index": len(self.blocks) - 1, "item_id": _PREFIX[block.kind] + block.id}
        return {"type": f"response.{name}"} | place | ({"content_index": 0} if block.kind in _PART else {})

    def _status(self, block: Block) -> str:
        cut = self.finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if cut else "completed"


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind is Kind.TEXT else {}


def _part(block: Block) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind is Kind.TEXT else {}
    return {"type": _PART[block.kind], "text": block.text} | extra


def _item(block: Block, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _PREFIX[block.kind] + block.id, "status": status}
    if block.kind is Kind.CALL:
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return item | {"type": "function_call"} | call
    if block.kind is Kind.REASONING:
        return item | {"type": "reasoning", "summary": [], "content": [_part(block)]}
    return item | {"type": "message", "role": "assistant", "content": [_part(block)]}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "speculation": usage["speculation"],
    }
