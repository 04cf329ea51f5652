"""Writes answers in the format of Anthropic's Messages API."""

import json
from collections.abc import Iterable
from typing import Any

from outrider.serve.anthropic.errors import anthropic_error
from outrider.serve.openai.blocks import Block, BlockWriter, Kind

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {  # type and field of the event that adds text
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter(BlockWriter):
    """Writes a message, whole or as a stream."""

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {"input_tokens": prompt_tokens, "output_tokens": 0}

    def start(self) -> Iterable[dict[str, Any]]:
        return [{"type": "message_start", "message": self.document()}, {"type": "ping"}]

    def begin(self, block: Block) -> Iterable[dict[str, Any]]:
        empty = _block(Block(kind=block.kind, name=block.name, call_id=block.call_id))
        return [{"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": empty}]

    def add(self, block: Block, text: str) -> dict[str, Any]:
        kind, field = _DELTAS[block.kind]
        return {
            "type": "content_block_delta",
            "index": len(self.blocks) - 1,
            "delta": {"type": kind, field: text},
        }

    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def finish(self) -> Iterable[dict[str, Any]]:
        document = self.document()
        delta = {name: document[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": document["usage"]}, {"type": "message_stop"}]

    def error(self, document: dict[str, Any]) -> str:
        return self.write(anthropic_error(document, 504 if document["error"]["type"] == "timeout_error" else 500))

    def document(self) -> dict[str, Any]:
        reason = "stop_sequence" if self.stop_string else _STOP_REASONS.get(self.finish_reason)
        return {
            "id": "msg_" + self.head["id"].partition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": list(map(_block, self.blocks)),
            "stop_reason": reason,
            "stop_sequence": self.stop_string,
            "usage": _usage(self.usage) if self.usage else self._usage,
        }


def _block(block: Block) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> Any:
    """Return the arguments of a call; {} if max_tokens has cut them short."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "speculation": usage["speculation"],
    }
