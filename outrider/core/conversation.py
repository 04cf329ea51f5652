"""Applies a chat template to a conversation, and finds the message that the template refuses or drops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from outrider.errors import OutriderError

_Message = dict[str, Any]


class InvalidMessage(OutriderError):
    """A message of a conversation that the chat template refuses, or drops."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"message {index} of the conversation: {reason}")
        self.index = index  # in the conversation, from 0
        self.reason = reason  # without the index


class _Mark(NamedTuple):
    """A text that stands in a copy of a conversation for a part of it."""

    message: int  # its index
    part: str  # for the error message
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The chat template of a tokenizer, with the options of a conversation."""

    tokenizer: Any
    options: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation as text. It contains every message.

        Raises:
            InvalidMessage: the template refuses a message, or drops a part of it.
            OutriderError: the template does not take these messages for another reason.
        """
        conversation = list(map(dict, messages))
        try:
            text = self._render(conversation, continue_final_message=self.continue_final_message)
        except Exception as error:  # a template may raise anything
            raise self._refusal(conversation, error) from error
        self._check_kept(conversation)
        return text

    def _render(self, conversation: list[_Message], *, continue_final_message: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=self.add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self.options,
            )
        )

    def _refusal(self, conversation: list[_Message], error: Exception) -> OutriderError:
        """Return the error for a conversation that the template refuses: it names the first refused message."""
        if isinstance(error, TemplateSyntaxError):
            return OutriderError(f"the model's chat template is invalid ({error}); give the model a valid one")
        if self._takes(conversation):  # so the template takes it, and cannot continue its last message
            return OutriderError(
                f"the model's chat template cannot continue the last message ({error}); let the last message be a text"
            )
        taken, refused = 0, len(conversation)  # numbers of first messages
        while refused - taken > 1:
            middle = (taken + refused) // 2
            if self._takes(conversation[:middle]):
                taken = middle
            else:
                refused = middle
        return InvalidMessage(taken, f"the model's chat template does not take it ({error}); change it, or remove it")

    def _takes(self, conversation: list[_Message]) -> bool:
        try:
            self._render(conversation, continue_final_message=False)
        except Exception:
            return False
        return True

    def _check_kept(self, conversation: list[_Message]) -> None:
        """Raise InvalidMessage if the template drops a part of a message.

        A text may legitimately be changed: white space at its ends, or the reasoning of earlier answers. So a copy of
        the conversation is rendered, in which each part is replaced by a mark of its own.
        """
        copy, marks = _mark(conversation)
        try:
            text = self._render(copy, continue_final_message=False)
        except Exception:  # the template checks a part, so it does not drop it
            return
        for mark in marks:
            if mark.text not in text:
                raise InvalidMessage(
                    mark.message, f"the model's chat template drops {mark.part}; write it in another way, or remove it"
                )


def _mark(conversation: Sequence[_Message]) -> tuple[list[_Message], list[_Mark]]:
    """Return a copy of a conversation with a mark in place of each text, name and call, and the marks."""
    marks: list[_Mark] = []

    def mark(index: int, part: str) -> str:
        marks.append(_Mark(index, part, f"mark{len(marks)}end"))
        return marks[-1].text

    copy = []
    for i, message in enumerate(conversation):
        marked = dict(message)
        role = message.get("role")
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            marked["content"] = mark(i, f"the text of a message with the role {role!r}")
        elif isinstance(content, list):
            marked["content"] = [_mark_part(part, lambda i=i: mark(i, "a part of its content")) for part in content]
        if message.get("name") and role != "tool":  # a tool is named by its call
            marked["name"] = mark(i, "its name")
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [_mark_call(call, lambda i=i: mark(i, "its function calls")) for call in calls]
        copy.append(marked)
    return copy, marks


def _mark_part(part: Any, mark: Any) -> Any:
    is_text = isinstance(part, dict) and isinstance(part.get("text"), str) and part["text"].strip()
    return part | {"text": mark()} if is_text else part


def _mark_call(call: Any, mark: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = {"argument": mark()} if isinstance(function.get("arguments"), dict) else mark()
    return call | {"function": function | {"name": mark(), "arguments": arguments}}
