"""Turns the messages of a chat request into those that a chat template takes. No part of a message is lost."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from outrider.core.conversation import InvalidMessage
from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.serve.openai.call_formats import CallFormat, format_of
from outrider.serve.openai.messages import FunctionCall, Message
from outrider.serve.openai.tools import Tools

_SHORT_ID = 9  # characters of the ids that Mistral's templates take
_TOOLS_PROMPT = """You may call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message for a chat template."""

    fields: dict[str, Any]
    origin: int | None  # index of the message of the request; None: it describes the tools
    is_result: bool = False  # a result of a tool, as text of the user

    @property
    def role(self) -> str:
        """The role in the template."""
        return str(self.fields["role"])


Conversation = tuple[Turn, ...]


def conversation(messages: Sequence[Message], tools: Tools | None, *, template: str) -> Conversation:
    """Return the messages for a chat template. If the template does not support tools, tools and calls become text.

    Raises:
        InvalidParam: a message responds to a call that there is not, or the arguments of a call are
            not JSON.
    """
    _check_call_ids(messages)
    roles = {} if "developer" in template else {"developer": "system"}
    if format := format_of(template):
        return tuple(
            Turn(fields=_template_message(message, i, roles.get(message.role, message.role), format), origin=i)
            for i, message in enumerate(messages)
        )
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        turn = _text_turn(message, i, roles.get(message.role, message.role))
        # Many templates reject two messages of one role in a row. Here the server has made the
        # second role.
        if turns and (turn.is_result or turns[-1].is_result) and _can_join(turns[-1], turn):
            turns[-1] = _join(turns[-1], turn, "\n")
        else:
            turns.append(turn)
    return tuple(turns) if tools is None else _with_tools(turns, tools)


def adaptations(turns: Conversation) -> Iterator[Conversation]:
    """Yield a conversation, then forms of it for stricter templates. Each one contains every text.

    Some templates reject two messages of one role in a row, some reject or drop a system message,
    or one after the first message. Then messages of one role become one message, and system
    messages become text of the user.
    """
    yield turns
    joined = _joined(turns)
    if len(joined) < len(turns):
        yield joined
    if any(turn.role == "system" for turn in turns):
        yield _joined(turns[:1] + tuple(map(_as_user, turns[1:])))
        yield _joined(tuple(map(_as_user, turns)))


def invalid_message(turns: Conversation, error: InvalidMessage) -> InvalidParam:
    """Return the error of a request whose chat template refuses or drops a message of a conversation."""
    origin = turns[error.index].origin
    if origin is None:
        return InvalidParam("tools", f"tools: they are described in a system message; {error.reason}")
    return InvalidParam(f"messages.{origin}", f"messages.{origin}: {error.reason}")


def _check_call_ids(messages: Sequence[Message]) -> None:
    """Raise InvalidParam if a tool message responds to no earlier call."""
    calls: set[str] = set()
    for i, message in enumerate(messages):
        calls |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in calls:
            field = f"messages.{i}.tool_call_id"
            raise InvalidParam(
                field,
                f"{field}: no message of the assistant before it has a call with the id"
                f" {message.tool_call_id!r}; send the message with the call as well",
            )


def _template_message(message: Message, index: int, role: str, format: CallFormat) -> dict[str, Any]:
    """Return a message for a chat template that supports tools."""
    fields: dict[str, Any] = _common_fields(message, role) | {"content": message.text()}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": _template_id(call.id, format),
                "type": "function",
                "function": _template_call(call.function, index, format),
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = _template_id(message.tool_call_id, format)
    return fields


def _template_id(id: str, format: CallFormat) -> str:
    takes = not format.short_ids or (len(id) == _SHORT_ID and id.isascii() and id.isalnum())
    return id if takes else sha256(id.encode()).hexdigest()[:_SHORT_ID]


def _template_call(call: FunctionCall, index: int, format: CallFormat) -> dict[str, Any]:
    """Return a call with its arguments as the template takes them."""
    parsed = _parse_call(call, index)
    return parsed | {"arguments": json.dumps(parsed["arguments"])} if format.text_arguments else parsed


def _text_turn(message: Message, index: int, role: str) -> Turn:
    """Return a message, with its calls as text, for a chat template without tools."""
    text = message.text()
    if message.role == "tool":
        result = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        return Turn(fields=result, origin=index, is_result=True)
    parts = [text] if text else []
    for call in message.tool_calls or ():
        parts.append(f"<tool_call>\n{json.dumps(_parse_call(call.function, index))}\n</tool_call>")
    return Turn(fields=_common_fields(message, role) | {"content": "\n".join(parts)}, origin=index)


def _common_fields(message: Message, role: str) -> dict[str, Any]:
    thoughts = message.thoughts()  # templates read one of these names
    fields = {"role": role, "name": message.name, "reasoning_content": thoughts, "thinking": thoughts}
    return {name: value for name, value in fields.items() if value is not None}


def _with_tools(turns: Sequence[Turn], tools: Tools) -> Conversation:
    """Return a conversation whose system message describes the tools."""
    prompt = _TOOLS_PROMPT.format(tools="\n".join(map(json.dumps, tools.descriptions())))
    description = Turn(fields={"role": "system", "content": prompt}, origin=None)
    first = turns[0]
    if first.role not in ("system", "developer"):
        return (description, *turns)
    return (_join(first, description, "\n\n"), *turns[1:])


def _joined(turns: Conversation) -> Conversation:
    """Return a conversation whose consecutive messages of one role are one message."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and _can_join(joined[-1], turn):
            joined[-1] = _join(joined[-1], turn, "\n\n")
        else:
            joined.append(turn)
    return tuple(joined)


def _can_join(first: Turn, second: Turn) -> bool:
    """Return whether two messages can be one: they have one role, and nothing but a text."""
    return first.role == second.role and first.fields.keys() == second.fields.keys() == {"role", "content"}


def _join(first: Turn, second: Turn, separator: str) -> Turn:
    content = f"{first.fields['content']}{separator}{second.fields['content']}"
    return replace(first, fields=first.fields | {"content": content}, is_result=second.is_result)


def _as_user(turn: Turn) -> Turn:
    """Return a system message as one of the user."""
    return replace(turn, fields=turn.fields | {"role": "user"}) if turn.role == "system" else turn


def _parse_call(call: FunctionCall, index: int) -> dict[str, Any]:
    """Return a call of a message with its arguments as an object, as templates expect it."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise OutriderError(
            f"messages.{index}: the arguments of a tool call are not JSON ({error}); send them as"
            " the server returned them"
        ) from error
    if not isinstance(arguments, dict):
        raise OutriderError(
            f"messages.{index}: the arguments of a tool call are not a JSON object; send them as"
            " the server returned them"
        )
    return {"name": call.name, "arguments": arguments}
