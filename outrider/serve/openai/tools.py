"""The tools of a request, and the grammar that enforces the format of their calls and their schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.constraint import Constraint
from outrider.core.guidance_tokenizer import ANY_SPECIAL
from outrider.core.params import InvalidParam
from outrider.errors import OutriderError
from outrider.serve.openai.call_formats import HERMES, CallFormat, quoted
from outrider.serve.openai.param_rules import json_rule, param_rules
from outrider.serve.openai.reasoning import Reasoning
from outrider.serve.openai.schema import ChatRequest, Function, NamedTool

# The schema of a function without arguments.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


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

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        """The schemas of the arguments, by the names of the functions."""
        return {function.name: function.parameters for function in self.functions}

    def constraint(self, format: CallFormat = HERMES, reasoning: Reasoning | None = None) -> Constraint:
        """Return the constraint of the output: text or calls in a format, or only calls if one is required.

        `reasoning` may come first. Text before a call is free: any token may be part of it, also
        special tokens and bytes that are no characters.
        """
        more = f"{quoted(format.separator)} call" if self.parallel and format.separator is not None else ""
        rest = (f" ({more})*" if more else "") + (f" {quoted(format.end)}" if format.end else "")
        rules = ["%llguidance {}", "ANY: /(?s:.*)/ | ~/(?s:.*)/"]  # ~ is the complement: bytes that are not UTF-8
        if self.required:
            rules.append(f"start: {quoted(format.trigger)} call{rest}")
        else:
            rules += self._free_text(format, reasoning, rest, repeats=bool(more))
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.functions))))
        for i, function in enumerate(self.functions):
            head = format.head(function.name).removeprefix(format.trigger)
            rules.append(f"call_{i}: {format.one_call(head, f'arguments_{i}')}")
            parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
            if format.param:
                rules += param_rules(f"arguments_{i}", parameters, format.param)
            else:
                rules.append(f"arguments_{i}: {json_rule(parameters)}")
        if format.param and format.param.text:
            rules.append(f"text[lazy]: ANY {quoted(format.param.close)}")
        grammar = Constraint.grammar("\n".join(rules))
        return replace(grammar, prefix=reasoning.grammar()) if reasoning else grammar

    def _free_text(self, format: CallFormat, reasoning: Reasoning | None, rest: str, *, repeats: bool) -> Iterator[str]:
        """Yield the rules of text that may have calls. `rest` is what follows the first call of several.

        A text that begins like reasoning is reasoning, and with some formats one that begins like a
        call is a call. With `repeats`, text and calls may follow.
        """
        starts = [reasoning.lead()] if reasoning and not reasoning.inside else []
        if format.at_start:
            heads = [format.head(function.name) for function in self.functions]
            starts += map(quoted, heads)
            yield f"start: silent* (TEXT | first{rest})"
            yield "first: " + " | ".join(format.one_call(head, f"arguments_{i}") for i, head in enumerate(heads))
        else:
            calls = f"head call{rest}"
            yield f"start: (silent* {calls})* silent* TEXT?" if repeats else f"start: silent* (TEXT | {calls})"
            yield f"head[lazy]: TEXT {quoted(format.trigger)}"
        yield f"silent: TEXT? {ANY_SPECIAL}"
        yield f"TEXT: ~(({' | '.join(starts)}) ANY)" if starts else "TEXT: ANY"

    def check_schemas(self, compile: Callable[[Constraint], object]) -> None:
        """Compile the schema of each function on its own, to find the cause of an error in their common grammar.

        Raises:
            InvalidParam: a schema is invalid. The message names the function and the fault.
        """
        for function in self.functions:
            try:
                compile(Constraint.json_schema(function.parameters or _NO_ARGUMENTS))
            except OutriderError as error:
                raise InvalidParam("tools", f"tools: the parameters of function {function.name!r}: {error}") from error

    def descriptions(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat templates."""
        return [
            {"type": "function", "function": function.model_dump(exclude={"strict"}, exclude_none=True)}
            for function in self.functions
        ]
