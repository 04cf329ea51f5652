"""The parts of a generated text: reasoning, content and function calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.openai.call_formats import CallFormat
from outrider.serve.openai.reasoning import Reasoning, ReasoningParser, thought_tokens
from outrider.serve.openai.tool_calls import ParsedCall, ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """What the text of an answer may have besides content.

    Attributes:
        calls: the format of function calls; None: there are none.
        functions: the schemas of the arguments of functions, by name.
        required: whether the answer is calls only.
        reasoning: the form of reasoning; None: there is none.
    """

    calls: CallFormat | None = None
    functions: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    required: bool = False
    reasoning: Reasoning | None = None


class OutputParser:
    """Splits generated text into its parts. The pieces in which the text comes do not matter."""

    def __init__(self, form: OutputForm) -> None:
        self._reasoning = ReasoningParser(form.reasoning) if form.reasoning else None
        self._calls = ToolCallParser(form.calls, form.functions, required=form.required) if form.calls else None

    @property
    def calls(self) -> list[ParsedCall]:
        return self._calls.calls if self._calls else []

    def add_text(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Add text and return the deltas of a stream, in order.

        Each has reasoning_content, then content, and then tool_calls, or some of them.
        """
        first: dict[str, Any] = {}
        if self._reasoning:
            thought, text = self._reasoning.add_text(text, last=last)
            first = {"reasoning_content": thought} if thought else {}
        if self._calls:
            deltas = self._calls.add_text(text, last=last)
        else:
            deltas = [{"content": text}] if text else []
        if first:
            deltas[:1] = [first | (deltas[0] if deltas else {})]
        return deltas

    def reasoning_tokens(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
        """Return how many of the tokens of the text are reasoning, after the last piece."""
        spans = self._reasoning.spans if self._reasoning else ()
        return thought_tokens(spans, lambda count: len(decode(tokens[:count])), len(tokens))
