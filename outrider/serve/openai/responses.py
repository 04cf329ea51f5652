"""Builds responses and stream chunks in the format of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import uuid4

from outrider.core.types import Completion, FinishReason, TokenLogprobs
from outrider.serve.openai.tool_calls import ToolCallParser
from outrider.serve.stream.ticket import StreamChunk

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBuilder:
    """Builds the response to one request."""

    chat: bool
    model: str
    decode: Decode
    logprobs: bool = False  # whether the request wants them
    tokens: bool = False  # whether chunks have a `speculation` field
    spell: Callable[[int], str] = str  # text of a single token
    calls: bool = False  # whether the text may have function calls
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, completions: Sequence[Completion], prompts: int) -> dict[str, Any]:
        """Return the response with all completions of `prompts` prompts."""
        choices = [self._choice(i, each) for i, each in enumerate(completions)]
        return self._head(part=False) | {"choices": choices, "usage": usage(completions, prompts)}

    def chunks(self, index: int) -> ChunkBuilder:
        """Return the builder of the stream chunks of one completion."""
        return ChunkBuilder(self, index)

    def chunk(
        self, index: int, piece: StreamChunk, *, delta: dict[str, Any], finish: str | None, offset: int = 0
    ) -> dict[str, Any]:
        """Return a stream chunk. `delta` is for chats; `offset` is the number of characters before it."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
        choice |= {"delta": delta} if self.chat else {"text": piece.text}
        if self.logprobs:
            choice["logprobs"] = self._logprobs(piece.logprobs, offset)
        if self.tokens:
            choice["speculation"] = self._speculation(piece)
        return self._head(part=True) | {"choices": [choice]}

    def _speculation(self, piece: StreamChunk) -> dict[str, Any]:
        told: dict[str, Any] = {"tokens": piece.token_texts, "from_draft": piece.from_draft}
        if guesses := piece.drafts:
            words = [self.spell(token) for token in guesses.tokens]
            told["drafts"] = {
                "tokens": words,
                "parents": guesses.parents,
                "accepted": guesses.accepted,
                "source": guesses.source,
            }
        return told

    def usage_chunk(self, completions: Sequence[Completion], prompts: int) -> dict[str, Any]:
        """Return the last chunk, with the usage."""
        return self._head(part=True) | {"choices": [], "usage": usage(completions, prompts)}

    def _head(self, *, part: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if part else "chat.completion") if self.chat else "text_completion"
        return {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.logprobs) if self.logprobs else None
        choice: dict[str, Any] = {"index": index, "finish_reason": str(completion.finish_reason), "logprobs": logprobs}
        if not self.chat:
            return choice | {"text": completion.text}
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self.calls:
            calls = ToolCallParser()
            message["content"] = calls.read(completion.text, last=True).get("content")
            choice["finish_reason"] = _finish(completion, calls)
            if calls.made:
                message["tool_calls"] = [call.whole() for call in calls.made]
        return choice | {"message": message}

    def _logprobs(self, entries: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._entry(each) for each in entries], "refusal": None}
        words = [self.decode([each.token]) for each in entries]
        return {
            "tokens": words,
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [{self.decode([id]): value for id, value in each.top} for each in entries],
            "text_offset": list(accumulate(map(len, words), initial=offset))[:-1],
        }

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        return self._word(entry.token, entry.logprob) | {"top_logprobs": [self._word(*each) for each in entry.top]}

    def _word(self, token: int, logprob: float) -> dict[str, Any]:
        word = self.decode([token])
        return {"token": word, "logprob": logprob, "bytes": list(word.encode())}


class ChunkBuilder:
    """Builds the stream chunks of one completion."""

    def __init__(self, reply: ResponseBuilder, index: int) -> None:
        self._reply, self._index = reply, index
        self._calls = ToolCallParser() if reply.calls else None
        self._begun = False
        self._offset = 0  # characters of all tokens so far, decoded one by one

    def next(self, piece: StreamChunk) -> dict[str, Any]:
        """Return the stream chunk of an engine chunk."""
        finish = str(piece.completion.finish_reason) if piece.completion else None
        delta: dict[str, Any] = {"content": piece.text}
        if self._calls:
            delta = self._calls.read(piece.text, last=piece.completion is not None)
            finish = _finish(piece.completion, self._calls) if piece.completion else None
        if not self._begun:
            delta = {"role": "assistant", "content": None if self._calls else ""} | delta
            self._begun = True
        part = self._reply.chunk(self._index, piece, delta=delta, finish=finish, offset=self._offset)
        if self._reply.logprobs and not self._reply.chat:
            self._offset += sum(map(len, part["choices"][0]["logprobs"]["tokens"]))
        return part


def _finish(completion: Completion, calls: ToolCallParser) -> str:
    """Return the finish reason in the words of OpenAI's API."""
    return (
        "tool_calls" if calls.made and completion.finish_reason is FinishReason.STOP else str(completion.finish_reason)
    )


def usage(completions: Sequence[Completion], prompts: int) -> dict[str, Any]:
    """Return the `usage` object. A prompt counts once for all of its completions."""
    each = len(completions) // prompts
    read = sum(len(completion.prompt_token_ids) for completion in completions[::each])
    made = sum(len(completion.token_ids) for completion in completions)
    passes = sum(completion.stats.passes for completion in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "speculation": {
            "target_passes": passes,
            "tokens_per_pass": made / passes if passes else 0.0,
            "draft_tokens": sum(completion.stats.draft_tokens for completion in completions),
            "accepted_tokens": sum(sum(completion.stats.accepted) for completion in completions),
            "exact": all(completion.stats.exact for completion in completions),
        },
    }


def problem(message: str, *, kind: str = "invalid_request_error", field: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    said = message.encode(errors="replace").decode()  # lone surrogates cannot be encoded
    named = field and field.encode(errors="replace").decode()
    return {"error": {"message": said, "type": kind, "param": named, "code": None}}
