"""Tools: their description in the prompt, and the grammar that enforces their schemas.

Calls have the format of Hermes and Qwen models: {"name": ..., "arguments": ...} on a line between <tool_call> and
</tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.constraint import STYLE, Constraint
from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.serve.openai.schema import ChatRequest, Function, FunctionCall, Message, NamedTool

_NOTHING = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}  # the schema of a function without arguments
_TELL = """You may call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request."""

    functions: tuple[Function, ...]
    must: bool  # the response must be a call
    many: bool  # several calls are allowed

    @classmethod
    def of(cls, asked: ChatRequest) -> Tools | None:
        """Return the tools of a request; None without tools or with tool_choice "none".

        Raises:
            OutriderError: tool_choice names an unknown function.
        """
        choice, functions = asked.tool_choice, tuple(tool.function for tool in asked.tools or ())
        if isinstance(choice, NamedTool):
            functions = tuple(each for each in functions if each.name == choice.function.name)
            if not functions:
                raise InvalidParam(
                    "tool_choice", f"tool_choice names {choice.function.name!r}, and tools have none of that name"
                )
        elif choice == "required" and not functions:
            raise InvalidParam("tool_choice", "tool_choice is required, and there are no tools; give some")
        if len({each.name for each in functions}) < len(functions):
            raise InvalidParam("tools", "two tools have the same name; rename one")
        if not functions or choice == "none":
            return None
        named = isinstance(choice, NamedTool)
        return cls(
            functions=functions,
            must=named or choice == "required",
            many=asked.parallel_tool_calls is not False and not named,
        )

    def constraint(self) -> Constraint:
        """Return the constraint: text or calls, or only calls if one is required."""
        rules = ["%llguidance {}"]
        more = ' ("\\n<tool_call>" call)*' if self.many else ""
        if self.must:
            rules.append(f'start: "<tool_call>" call{more}')
        else:
            rules += [f"start: TEXT | head call{more}", 'head[lazy]: TEXT "<tool_call>"', r"TEXT: /(.|\n)*/"]
        rules.append('call: "\\n" body "\\n</tool_call>"')
        rules.append("body: " + " | ".join(f"body_{i}" for i in range(len(self.functions))))
        for i, each in enumerate(self.functions):
            opening = json.dumps(f'{{"name": "{each.name}", "arguments": ')
            schema = {"x-guidance": dict(STYLE)} | (each.parameters if each.parameters is not None else _NOTHING)
            rules.append(f'body_{i}: {opening} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return Constraint.grammar("\n".join(rules))

    def described(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat templates."""
        return [
            {"type": "function", "function": each.model_dump(exclude={"strict"}, exclude_none=True)}
            for each in self.functions
        ]


def knows_calls(template: str) -> bool:
    """Return whether a chat template uses this format of tools and calls."""
    return all(part in template for part in ("tools", "<tool_call>", '"name"', '"arguments"'))


def conversation(messages: Sequence[Message], tools: Tools | None, *, known: bool) -> list[dict[str, Any]]:
    """Return the messages for a chat template. Without `known` support for tools, they become text."""
    if known:
        return [_turn(message) for message in messages]
    turns: list[dict[str, Any]] = []
    for message in messages:
        text = _as_text(message)
        if message.role == "tool" and turns and turns[-1]["role"] == "user":
            turns[-1]["content"] += "\n" + text  # many templates reject two messages of one role in a row
        else:
            turns.append({"role": "user" if message.role == "tool" else message.role, "content": text})
    if tools is None:
        return turns
    told = _TELL.format(tools="\n".join(map(json.dumps, tools.described())))
    if turns[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": told}, *turns]
    return [turns[0] | {"content": f"{turns[0]['content']}\n\n{told}"}, *turns[1:]]


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.text()}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call.function)} for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _as_text(message: Message) -> str:
    if message.role == "tool":
        return f"<tool_response>\n{message.text()}\n</tool_response>"
    calls = [json.dumps(_called(call.function)) for call in message.tool_calls or ()]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([*([message.text()] if message.text() else []), *written])


def _called(call: FunctionCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates expect it."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise OutriderError(f"arguments of a tool call are not JSON ({error}); give them back as they came") from error
    if not isinstance(arguments, dict):
        raise OutriderError("arguments of a tool call are no JSON object; give them back as they came")
    return {"name": call.name, "arguments": arguments}
