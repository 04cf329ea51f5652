"""Request bodies of Anthropic's Messages API, and how they become chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.serve.anthropic.writer import MessageWriter
from outrider.serve.openai.base import StrictModel, Unused, type_discriminator
from outrider.serve.openai.foreign import Ignored
from outrider.serve.openai.messages import content_kind
from outrider.serve.openai.translated import TranslatedBody, assistant_message, call_of


class _Block(StrictModel):
    cache_control: Ignored = None


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Ignored = None


_Text = Annotated[Annotated[str, Tag("str")] | Annotated[list[TextBlock], Tag("[parts]")], Discriminator(content_kind)]


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Text = ""
    is_error: bool = False


_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    type_discriminator("text", "thinking", "tool_use", "tool_result"),
]
_Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[_AnyBlock], Tag("[parts]")], Discriminator(content_kind)
]


class AnthropicMessage(StrictModel):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: _Content

    @model_validator(mode="after")
    def _check(self) -> AnthropicMessage:
        wrong = (ThinkingBlock, ToolUseBlock) if self.role == "user" else (ToolResultBlock,)
        for block in self.blocks():
            if isinstance(block, wrong):
                raise ValueError(f"a message with role {self.role} has a block of type {block.type}; remove it")
        return self

    def blocks(self) -> Sequence[_AnyBlock]:
        """Return the content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(StrictModel):
    """A function that the model may call. Tools that run on the server are not supported."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Accepted for compatibility. A schema is always enforced.")
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


class ToolChoice(StrictModel):
    """Which tools the model must or may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a tool_choice of type tool has a name, and no other type has one; change one of them")
        return self


class Thinking(StrictModel):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Annotated[Any, Unused(("summarized",)), Field(description='Only "summarized" is accepted.')] = None


class JsonFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The form of the answer."""

    format: JsonFormat | None = None
    effort: str | None = Field(None, description="For chat templates that read reasoning_effort.")


class Metadata(StrictModel):
    """Who sends the request."""

    user_id: str | None = Field(None, description="Prefix caching and learned outputs are separate for each user.")


class CountTokensRequest(TranslatedBody):
    """The body of `/v1/messages/count_tokens`."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "stop": "stop_sequences",
            "max_completion_tokens": "max_tokens",
            "response_format": "output_config",
            "reasoning_effort": "output_config",
            "enable_thinking": "thinking",
            "user": "metadata",
            "parallel_tool_calls": "tool_choice",
        }
    )

    messages: list[AnthropicMessage] = Field(min_length=1)
    system: _Text | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def writer(self, prompt_tokens: int) -> MessageWriter:
        return MessageWriter(prompt_tokens)

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        config = self.output_config or OutputConfig(effort=None)
        fields: dict[str, Any] = {"messages": self._chat_messages(), "reasoning_effort": config.effort}
        if self.messages[-1].role == "assistant":  # the answer goes on with its text
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if choice and choice.name is not None:
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice:
            fields["tool_choice"] = "required" if choice.type == "any" else choice.type
        if choice and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.thinking and self.thinking.type != "adaptive":
            fields["enable_thinking"] = self.thinking.type == "enabled"
        if config.format:
            schema = {"name": "answer", "schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        self._origins.clear()
        if self.system:
            self.add_message(messages, {"role": "system", "content": _text(self.system)}, "system")
        for i, message in enumerate(self.messages):
            blocks = message.blocks()
            if message.role == "assistant":
                self.add_message(messages, _answer(blocks), f"messages.{i}")
                continue
            for part in _user_messages(blocks):
                self.add_message(messages, part, f"messages.{i}")
        return messages


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field([])
    stream: bool = False
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens.")
    metadata: Metadata | None = None
    service_tier: Ignored = None

    def chat_fields(self) -> dict[str, Any]:
        fields = super().chat_fields()
        for name in ("stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(self, name)
        fields |= {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        return fields | {"user": self.metadata and self.metadata.user_id}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _answer(blocks: Sequence[_AnyBlock]) -> dict[str, Any]:
    """Return a message of the assistant."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [call_of(block.id, block.name, json.dumps(block.input)) for block in blocks if block.type == "tool_use"]
    return assistant_message("\n".join(texts), calls, "\n".join(thoughts))


def _user_messages(blocks: Sequence[_AnyBlock]) -> list[dict[str, Any]]:
    """Return the messages of a turn of the user: a result of a tool is a message of its own."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = ("Error: " if block.is_error else "") + _text(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, TextBlock) and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + block.text
        elif isinstance(block, TextBlock):
            messages.append({"role": "user", "content": block.text})
    return messages


def _function(tool: AnthropicTool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema} | description}
