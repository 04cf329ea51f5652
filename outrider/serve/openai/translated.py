"""The base of the request bodies of other APIs, which become chats."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationError

from outrider.core.params import InvalidParam
from outrider.core.validation import mistake
from outrider.serve.openai.blocks import BlockWriter
from outrider.serve.openai.schema import ChatRequest, EngineFields, field_of


class TranslatedBody(EngineFields):
    """A request that becomes a chat.

    Attributes:
        names: the fields of this API by the fields of the chat that are made of them.
    """

    names: ClassVar[Mapping[str, str]] = {}
    model: str | None = Field(None, description="Name of the model, as in /v1/models. Optional.")
    _origins: list[str] = PrivateAttr(default_factory=list)  # the field that each message of the chat is made of

    @abstractmethod
    def writer(self, prompt_tokens: int) -> BlockWriter:
        """Return what writes the response. `prompt_tokens` is the length of the prompt."""

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat. None: the field is absent. `add_message` collects its messages."""

    def chat(self) -> ChatRequest:
        """Return the chat. Raises InvalidParam if a field is invalid."""
        engine = {name: getattr(self, name) for name in (*EngineFields.model_fields, "model")}
        fields = engine | self.chat_fields()
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            field = field_of(first) or "messages"
            raise InvalidParam(field, f"{field}: {mistake(first)}") from error

    def add_message(self, messages: list[dict[str, Any]], message: dict[str, Any], origin: str) -> None:
        """Append a message, or join it with the last one if both are the assistant's."""
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant":
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            texts = [each["content"] for each in (last, message) if each.get("content")]
            thoughts = [each["reasoning_content"] for each in (last, message) if each.get("reasoning_content")]
            messages[-1] = assistant_message("\n".join(texts), calls, "\n".join(thoughts))
            return
        messages.append(message)
        self._origins.append(origin)

    def param_name(self, param: str) -> str:
        """Return the field of this API for a field of the chat."""
        field, _, rest = param.partition(".")
        index = rest.partition(".")[0]
        if field == "messages" and index.isdecimal() and int(index) < len(self._origins):
            return self._origins[int(index)]
        return self.names.get(field, param)


def assistant_message(text: str, calls: list[dict[str, Any]], thoughts: str) -> dict[str, Any]:
    """Return a message of the assistant for a chat."""
    fields = {"content": text, "tool_calls": calls, "reasoning_content": thoughts}
    return {"role": "assistant"} | {name: value for name, value in fields.items() if value}


def call_of(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a function call of a message for a chat."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
