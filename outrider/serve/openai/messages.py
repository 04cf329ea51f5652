"""The messages of a chat request, also those that clients copy from other servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.serve.openai.base import StrictModel
from outrider.serve.openai.foreign import ForeignMessageFields, Ignored

_MEDIA = {  # by the type of a content part: what is not supported
    "image_url": "images are",
    "input_image": "images are",
    "image": "images are",
    "input_audio": "audio is",
    "audio_url": "audio is",
    "video_url": "videos are",
    "file": "files are",
    "input_file": "files are",
}


class FunctionCall(StrictModel):
    """The name and the arguments of a function call."""

    name: str
    arguments: str = Field(description="A JSON object.")


class ToolCall(StrictModel):
    """A function call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class ContentPart(StrictModel):
    """A part of the content of a message: a text, or a refusal of an assistant."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""
    cache_control: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise PydanticCustomError("media", f"{_MEDIA[kind]} not supported by this model; send text only")
        return value

    @model_validator(mode="after")
    def _check(self) -> ContentPart:
        other = "refusal" if self.type == "text" else "text"
        if self.type not in self.model_fields_set or other in self.model_fields_set:
            raise ValueError(f"a part of type {self.type} must have the field {self.type}, and not {other}")
        return self


def content_kind(value: Any) -> str:
    """Return the tag of a content: a text, or a list of its parts."""
    return "[parts]" if isinstance(value, list) else "str"


# The tags are left out of the names of fields in error messages; see `field_of`.
_Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[ContentPart], Tag("[parts]")], Discriminator(content_kind)
]


class Message(ForeignMessageFields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = Field(None, description="For chat templates that write names.")
    refusal: str | None = Field(None, description="The text of an assistant message without content.")
    reasoning_content: str | None = Field(None, description="Extension. For chat templates that write it.")
    reasoning: str | None = Field(None, description="Extension. Another name of reasoning_content.")
    tool_calls: list[ToolCall] | None = Field(None, description="Function calls of the assistant.")
    tool_call_id: str | None = Field(None, description="The call that a tool message responds to.")

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message with role {self.role} has tool_calls; only assistant messages may have them")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message with role tool has no tool_call_id; give the id of the call")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"a message with role {self.role} has a tool_call_id; only tool messages may have one")
        if self.content is None and not self.tool_calls and self.refusal is None and self.thoughts() is None:
            raise ValueError("the message has no content; give content or tool_calls")
        return self

    def text(self) -> str:
        """Return the text of the message; "" if it has only function calls or reasoning."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "".join(part.text or part.refusal for part in self.content)

    def thoughts(self) -> str | None:
        """Return the reasoning of an earlier answer."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content
