"""Describes tools in the prompt, and makes the grammar that enforces their schemas.

Calls have the format of Hermes and Qwen models: {"name": ..., "arguments": ...} on a line between <tool_call> and
</tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.constraint import STYLE, Constraint
from outrider.core.guidance_tokenizer import ANY_SPECIAL
from outrider.core.markers import CALL_END, CALL_START
from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.serve.openai.schema import ChatRequest, Function, FunctionCall, Message, NamedTool

# The schema of a function without arguments.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TOOLS_PROMPT = """You may call functions. Each line between <tools> and </tools> describes one:
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
    required: bool  # the response must be a call
    parallel: bool  # several calls are allowed

    @classmethod
    def of(cls, body: ChatRequest) -> Tools | None:
        """Return the tools of a request; None without tools or with tool_choice "none".

        Raises:
            InvalidParam: tool_choice does not fit the tools, or two tools have the same name.
        """
        choice = body.tool_choice
        functions = tuple(tool.function for tool in body.tools or ())
        if isinstance(choice, NamedTool):
            functions = tuple(function for function in functions if function.name == choice.function.name)
            if not functions:
                name = choice.function.name
                raise InvalidParam("tool_choice", f"tool_choice names {name!r}, which is not in tools; add it to tools")
        elif choice == "required" and not functions:
            raise InvalidParam("tool_choice", "tool_choice is required, but there are no tools; give tools")
        if len({function.name for function in functions}) < len(functions):
            raise InvalidParam("tools", "two tools have the same name; rename one")
        if not functions or choice == "none":
            return None
        is_named = isinstance(choice, NamedTool)
        return cls(
            functions=functions,
            required=is_named or choice == "required",
            parallel=body.parallel_tool_calls is not False and not is_named,
        )

    def constraint(self) -> Constraint:
        """Return the constraint of the output: text or calls, or only calls if one is required.

        Text before a call is free: any token may be part of it, also special tokens and bytes that are no characters.
        """
        rules = ["%llguidance {}"]
        more_calls = f' ("\\n{CALL_START}" call)*' if self.parallel else ""
        if self.required:
            rules.append(f'start: "{CALL_START}" call{more_calls}')
        else:
            rules += [
                f"start: silent* (TEXT | head call{more_calls})",
                f"silent: TEXT? {ANY_SPECIAL}",
                f'head[lazy]: TEXT "{CALL_START}"',
                "TEXT: /(?s:.*)/ | ~/(?s:.*)/",  # ~ is the complement: bytes that are not UTF-8
            ]
        rules.append(f'call: "\\n" body "\\n{CALL_END}"')
        rules.append("body: " + " | ".join(f"body_{i}" for i in range(len(self.functions))))
        for i, function in enumerate(self.functions):
            opening = json.dumps(f'{{"name": "{function.name}", "arguments": ')
            parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
            schema = {"x-guidance": dict(STYLE)} | parameters
            rules.append(f'body_{i}: {opening} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return Constraint.grammar("\n".join(rules))

    def descriptions(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat templates."""
        return [
            {"type": "function", "function": function.model_dump(exclude={"strict"}, exclude_none=True)}
            for function in self.functions
        ]


def supports_tool_calls(template: str) -> bool:
    """Return whether a chat template uses this format of tools and calls."""
    return all(part in template for part in ("tools", CALL_START, '"name"', '"arguments"'))


def conversation(messages: Sequence[Message], tools: Tools | None, *, template_has_tools: bool) -> list[dict[str, Any]]:
    """Return the messages for a chat template. If the template does not support tools, tools and calls become text."""
    if template_has_tools:
        return [_template_message(message) for message in messages]
    converted: list[dict[str, Any]] = []
    for message in messages:
        text = _as_text(message)
        if message.role == "tool" and converted and converted[-1]["role"] == "user":
            converted[-1]["content"] += "\n" + text  # many templates reject two messages of one role in a row
        else:
            converted.append({"role": "user" if message.role == "tool" else message.role, "content": text})
    if tools is None:
        return converted
    tools_prompt = _TOOLS_PROMPT.format(tools="\n".join(map(json.dumps, tools.descriptions())))
    first = converted[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": tools_prompt}, *converted]
    return [first | {"content": f"{first['content']}\n\n{tools_prompt}"}, *converted[1:]]


def _template_message(message: Message) -> dict[str, Any]:
    """Return a message for a chat template that supports tools."""
    converted: dict[str, Any] = {"role": message.role, "content": message.text()}
    if message.tool_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _parse_call(call.function)} for call in message.tool_calls
        ]
    if message.tool_call_id:
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _as_text(message: Message) -> str:
    """Return a message as text, including its calls, for a chat template without tools."""
    text = message.text()
    if message.role == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    parts = [text] if text else []
    for call in message.tool_calls or ():
        parts.append(f"{CALL_START}\n{json.dumps(_parse_call(call.function))}\n{CALL_END}")
    return "\n".join(parts)


def _parse_call(call: FunctionCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates expect it."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise OutriderError(
            f"the arguments of a tool call are not JSON ({error}); send them as the server returned them"
        ) from error
    if not isinstance(arguments, dict):
        raise OutriderError("the arguments of a tool call are not a JSON object; send them as the server returned them")
    return {"name": call.name, "arguments": arguments}
