"""Builds the bodies of responses and the events of streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse

from outrider.core.stats import Stats
from outrider.core.token_text import SingleTokens
from outrider.core.types import Completion, FinishReason, Request
from outrider.serve.openai.blocks import EventWriter
from outrider.serve.openai.logprobs import Echo, LogprobsBuilder, TokenOffsets
from outrider.serve.openai.output import OutputForm, OutputParser
from outrider.serve.stream.request_stream import StreamChunk

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBuilder:
    """Builds the response to one request, in one part or as a stream."""

    chat: bool
    model: str
    num_prompts: int
    writer: EventWriter  # writes what this class builds, in the format of the API
    decode: Decode
    tokens: SingleTokens
    logprobs: LogprobsBuilder | None = None  # if the request wants them
    include_speculation: bool = False  # whether chunks have a `speculation` field
    include_usage: bool = False  # whether the last chunk of a stream has the usage
    continuous_usage: bool = False  # whether chunks have the usage so far
    form: OutputForm | None = None  # what the text may have besides content; None: nothing
    token_ids: bool = False  # whether choices have the ids of their tokens
    echoes: Sequence[Echo] = ()  # by prompt: what its completions begin with; (): nothing
    n: int = 1  # completions of each prompt that are returned, the likeliest ones
    is_empty: bool = False  # whether the choices have no completion
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of the whole response."""
        size = len(completions) // self.num_prompts
        chosen = []
        for prompt in range(self.num_prompts):
            group = completions[prompt * size : (prompt + 1) * size]
            best = group if size == self.n else sorted(group, key=_mean_logprob, reverse=True)[: self.n]
            chosen += [(each, self.echoes[prompt] if self.echoes else None) for each in best]
        choices = [self._choice(index, completion, echo) for index, (completion, echo) in enumerate(chosen)]
        document = self._head(is_chunk=False) | {"choices": choices, "usage": self._usage(completions)}
        return self.writer.response(document)

    def chunk(
        self,
        index: int,
        chunk: StreamChunk,
        *,
        delta: dict[str, Any],
        finish_reason: str | None,
        offsets: TokenOffsets,
    ) -> dict[str, Any]:
        """Return a stream chunk in the format of OpenAI's API.

        Args:
            index: of the completion.
            chunk: what the engine has added.
            delta: the new part of the message, for chats.
            finish_reason: in the last chunk.
            offsets: the tokens before the chunk. Those of the chunk are added.
        """
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"delta": delta} if self.chat else {"text": chunk.text}
        if chunk.completion and chunk.completion.stop_string:
            choice["stop_reason"] = chunk.completion.stop_string
        if self.logprobs:
            choice["logprobs"] = self.logprobs.build(chunk.logprobs, offsets)
        if self.token_ids:
            choice["token_ids"] = list(chunk.tokens)
        if self.include_speculation:
            choice["speculation"] = self._speculation(chunk)
        return self._head(is_chunk=True) | {"choices": [choice]}

    def delta_chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a stream chunk with a part of a message alone. The next chunk of the completion has its tokens."""
        choice = {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}
        return self._head(is_chunk=True) | {"choices": [choice]}

    def _speculation(self, chunk: StreamChunk) -> dict[str, Any]:
        speculation: dict[str, Any] = {"tokens": chunk.token_texts, "from_draft": chunk.from_draft}
        if drafts := chunk.drafts:
            speculation["drafts"] = {
                "tokens": list(map(self.tokens.text, drafts.tokens)),
                "parents": drafts.parents,
                "accepted": drafts.accepted,
                "source": drafts.source,
            }
        return speculation

    def stream_end(self, completions: Sequence[Completion]) -> str:
        """Return the events after the last chunk of each completion."""
        if not self.include_usage and not self.writer.needs_usage:
            return self.writer.end()
        document = self._head(is_chunk=True) | {"choices": [], "usage": self._usage(completions)}
        return self.writer.chunk(document) + self.writer.end()

    def error(self, message: str, *, kind: str) -> str:
        """Return the event of an error. `kind` is its type."""
        return self.writer.error(error_response(message, kind=kind))

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        reasoning = sum(map(self._reasoning_tokens, completions))
        return usage(completions, self.num_prompts) | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _reasoning_tokens(self, completion: Completion) -> int:
        if self.form is None or self.form.reasoning is None:
            return 0
        parser = OutputParser(self.form)
        parser.add_text(completion.text, last=True)
        return parser.reasoning_tokens(completion.token_ids, self.decode)

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields that responses and chunks have in common."""
        chat_object = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, index: int, completion: Completion, echo: Echo | None) -> dict[str, Any]:
        logprobs = None
        if self.is_empty:
            completion = replace(completion, text="", logprobs=())
        if self.logprobs and echo:
            logprobs = self.logprobs.build(echo.before(completion.logprobs), TokenOffsets(self.decode, ()))
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        elif self.logprobs:
            offsets = TokenOffsets(self.decode, completion.prompt_token_ids)
            logprobs = self.logprobs.build(completion.logprobs, offsets)
        choice: dict[str, Any] = {"index": index, "finish_reason": str(completion.finish_reason), "logprobs": logprobs}
        if self.token_ids:
            choice["token_ids"] = list(completion.token_ids)
            choice["prompt_token_ids"] = list(completion.prompt_token_ids)
            choice["weight_versions"] = list(map(list, completion.weight_versions))
        if not self.chat:
            return choice | {"text": (echo.text if echo else "") + completion.text}
        content = None if self.form else completion.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if completion.stop_string:
            choice["stop_reason"] = completion.stop_string
        if self.form:
            parser = OutputParser(self.form)
            deltas = parser.add_text(completion.text, last=True)
            for name in ("reasoning_content", "content"):
                message |= {name: text} if (text := "".join(delta.get(name, "") for delta in deltas)) else {}
            choice["finish_reason"] = _finish_reason(completion, parser)
            if parser.calls:
                message["tool_calls"] = [call.to_openai() for call in parser.calls]
        return choice | {"message": message}


class ChunkBuilder:
    """Builds the stream chunks of one completion of a response."""

    def __init__(self, builder: ResponseBuilder, index: int, request: Request) -> None:
        self._builder = builder
        self._index = index  # of the completion
        self._parser = OutputParser(builder.form) if builder.form else None
        self._started = False
        self._offsets = TokenOffsets(builder.decode, request.prompt_token_ids)
        self._prompt_tokens = len(request.prompt_token_ids) + len(request.source_token_ids)
        self._output_tokens = 0

    def events(self, chunk: StreamChunk) -> str:
        """Return the events of what the engine has added, or of the error that ends the completion."""
        events = ""
        if chunk.text or not chunk.error:
            events = "".join(map(self._builder.writer.chunk, self._documents(chunk)))
        if chunk.error:
            events += self._builder.error(chunk.error, kind="server_error")
        return events

    def _documents(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Return the stream chunks for what the engine has added: one, and one more for each text behind a call."""
        finish_reason = str(chunk.completion.finish_reason) if chunk.completion else None
        deltas: list[dict[str, Any]] = [{"content": chunk.text}]
        if self._parser:
            deltas = self._parser.add_text(chunk.text, last=chunk.completion is not None) or [{}]
            finish_reason = _finish_reason(chunk.completion, self._parser) if chunk.completion else None
        if not self._started:
            deltas[0] = {"role": "assistant", "content": None if self._parser else ""} | deltas[0]
            self._started = True
        self._output_tokens += len(chunk.tokens)
        document = self._builder.chunk(
            self._index, chunk, delta=deltas[-1], finish_reason=finish_reason, offsets=self._offsets
        )
        if self._builder.continuous_usage:
            document["usage"] = token_counts(self._prompt_tokens, self._output_tokens)
        return [*(self._builder.delta_chunk(self._index, delta) for delta in deltas[:-1]), document]


def _mean_logprob(completion: Completion) -> float:
    """Return the mean log-probability of the tokens of a completion."""
    return sum(entry.logprob for entry in completion.logprobs) / max(len(completion.logprobs), 1)


def _finish_reason(completion: Completion, parser: OutputParser) -> str:
    """Return the finish reason of a chat with tools, as OpenAI's API names it."""
    if parser.calls and completion.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return str(completion.finish_reason)


def token_counts(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the fields that every `usage` object has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


def usage(completions: Sequence[Completion], num_prompts: int) -> dict[str, Any]:
    """Return the `usage` object. A prompt counts once for all of its completions."""
    completions_per_prompt = len(completions) // num_prompts
    first_completions = completions[::completions_per_prompt]
    prompt_tokens = sum(completion.num_input_tokens for completion in first_completions)
    cached_tokens = sum(completion.num_cached_prompt_tokens for completion in first_completions)
    output_tokens = sum(len(completion.token_ids) for completion in completions)
    stats = reduce(add, (completion.stats for completion in completions), Stats())
    passes = stats.passes
    return token_counts(prompt_tokens, output_tokens) | {
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "speculation": {
            "target_passes": passes,
            "tokens_per_pass": output_tokens / passes if passes else 0.0,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": sum(stats.accepted),
            "exact": stats.exact,
            "bound": stats.bound and stats.bound.as_dict(),
        },
    }


def error_response(message: str, *, kind: str = "invalid_request_error", field: str | None = None) -> dict[str, Any]:
    """Return the body of an error response.

    Args:
        message: what is wrong and how to fix it.
        kind: the type of the error.
        field: the field of the request that is wrong.
    """
    # Lone surrogates in a message or a field name cannot be encoded in UTF-8, so they are replaced.
    utf8_message = message.encode(errors="replace").decode()
    utf8_field = field and field.encode(errors="replace").decode()
    return {"error": {"message": utf8_message, "type": kind, "param": utf8_field, "code": None}}


def retry_response(message: str, *, kind: str = "server_error", status: int = 503) -> JSONResponse:
    """Return the response to a request that another server, or this one later, may answer."""
    return JSONResponse(error_response(message, kind=kind), status, {"Retry-After": "1"})  # seconds
