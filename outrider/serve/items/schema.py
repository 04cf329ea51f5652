"""The request body of OpenAI's Responses API, and how it becomes a chat."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.serve.items.writer import ItemWriter
from outrider.serve.openai.base import StrictModel, Unused, type_discriminator
from outrider.serve.openai.foreign import Ignored, OpenAIFields, Verbosity
from outrider.serve.openai.messages import content_kind
from outrider.serve.openai.schema import NamedSchema, ObjectFormat, TextFormat
from outrider.serve.openai.translated import TranslatedBody, assistant_message, call_of

_SEND_ALL = "send the whole conversation as input, since this server stores no responses"
_Stored = Annotated[Any, Unused((), _SEND_ALL), Field(description="Only null is accepted.")]
_Unstored = Annotated[Any, Unused((False,), _SEND_ALL), Field(description="Only false is accepted.")]


class _Item(StrictModel):
    id: Ignored = None
    status: Ignored = None


class TextPart(StrictModel):
    """A part of a text."""

    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: Ignored = None
    logprobs: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            raise PydanticCustomError("media", f"{kind} is not supported by this model; send text only")
        return value


_Text = Annotated[Annotated[str, Tag("str")] | Annotated[list[TextPart], Tag("[parts]")], Discriminator(content_kind)]


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    phase: Ignored = None


class CallItem(_Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text


class ReasoningItem(_Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[TextPart] = Field([])
    content: list[TextPart] = Field([])
    encrypted_content: Ignored = None


_AnyItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[OutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    type_discriminator("message", "function_call", "function_call_output", "reasoning", default="message"),
]
_Items = Annotated[Annotated[str, Tag("str")] | Annotated[list[_AnyItem], Tag("[parts]")], Discriminator(content_kind)]


class FunctionTool(StrictModel):
    """A function that the model may call. Tools that run on the server are not supported."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Accepted for compatibility. A schema is always enforced.")


class NamedFunction(StrictModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class SchemaTextFormat(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextConfig(StrictModel):
    """The form of the text."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("[text]")]
            | Annotated[ObjectFormat, Tag("[json_object]")]
            | Annotated[SchemaTextFormat, Tag("[json_schema]")],
            type_discriminator("text", "json_object", "json_schema"),
        ]
        | None
    ) = None
    verbosity: Verbosity = None


class ReasoningConfig(StrictModel):
    """How the model reasons."""

    effort: str | None = Field(None, description="For chat templates that read reasoning_effort.")
    summary: Ignored = None
    generate_summary: Ignored = None


class StreamConfig(StrictModel):
    """Options of a stream."""

    include_obfuscation: Ignored = None


class ResponsesRequest(OpenAIFields, TranslatedBody):
    """The body of `/v1/responses`."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "response_format": "text",
            "reasoning_effort": "reasoning",
        }
    )

    input: _Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    user: str | None = Field(None, description="Prefix caching and learned outputs are separate for each user.")
    store: _Unstored = None
    previous_response_id: _Stored = None
    conversation: _Stored = None
    background: _Unstored = None
    truncation: Annotated[Any, Unused(("disabled",)), Field(description='Only "disabled" is accepted.')] = None
    top_logprobs: Annotated[Any, Unused((0,)), Field(description="Only 0 is accepted.")] = None
    stream_options: StreamConfig | None = None
    include: Ignored = None
    metadata: Ignored = None
    max_tool_calls: Ignored = None

    def writer(self, prompt_tokens: int) -> ItemWriter:
        shown = {"instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "text", "tools", "top_p"}
        fields = self.model_dump(include=shown | {"tool_choice", "reasoning"}, by_alias=True, warnings=False)
        empty = {"tools": [], "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}}
        return ItemWriter(fields | {name: value for name, value in empty.items() if not fields[name]})

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": getattr(choice, "name", None)}}
        return {
            "messages": self._chat_messages(),
            "tools": self.tools and [_tool(tool) for tool in self.tools],
            "tool_choice": named if isinstance(choice, NamedFunction) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "user": self.user,
        }

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        self._origins.clear()
        if self.instructions:
            self.add_message(messages, {"role": "system", "content": self.instructions}, "instructions")
        if isinstance(self.input, str):
            self.add_message(messages, {"role": "user", "content": self.input}, "input")
            return messages
        for i, item in enumerate(self.input):
            self.add_message(messages, _message(item), f"input.{i}")
        return messages


def _message(item: _AnyItem) -> dict[str, Any]:
    if isinstance(item, CallItem):
        return assistant_message("", [call_of(item.call_id, item.name, item.arguments)], "")
    if isinstance(item, OutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
    if isinstance(item, ReasoningItem):
        return assistant_message("", [], _joined(item.content or item.summary))
    if item.role == "assistant":
        return assistant_message(_joined(item.content), [], "")
    return {"role": item.role, "content": _joined(item.content)}


def _joined(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}


def _response_format(form: TextFormat | ObjectFormat | SchemaTextFormat | None) -> dict[str, Any] | None:
    if not isinstance(form, SchemaTextFormat):
        return None if form is None else form.model_dump()
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
