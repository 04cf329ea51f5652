"""The formats in which models are trained to write function calls, found by the chat template of the model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from outrider.core.markers import CALL_END, CALL_START


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls: `trigger` call (`separator` call)* `end`.

    A call is `open` name `middle` arguments `close`. The arguments are JSON.

    Attributes:
        separator: what stands before each call after the first; None: a response has one call.
        in_template: the parts of a chat template of this format.
        at_start: whether the trigger counts only where the output begins.
        text_arguments: whether the chat template takes the arguments of a call as JSON text, and not as an object.
        short_ids: whether the chat template takes only ids of nine letters and digits.
    """

    trigger: str
    open: str = ""
    middle: str
    close: str = ""
    separator: str | None = None
    end: str = ""
    in_template: tuple[str, ...]
    at_start: bool = False
    text_arguments: bool = False
    short_ids: bool = False

    def one_call(self, name: str, arguments: str) -> str:
        """Return the grammar of a call without its trigger. `arguments` is the rule of its arguments."""
        close = f" {json.dumps(self.close, ensure_ascii=False)}" if self.close else ""
        return f"{json.dumps(self.open + name + self.middle, ensure_ascii=False)} {arguments}{close}"


HERMES = CallFormat(
    trigger=CALL_START,
    open='\n{"name": "',
    middle='", "arguments": ',
    close="}\n" + CALL_END,
    separator="\n" + CALL_START,
    in_template=(CALL_START, '"name"', '"arguments"'),
)
_LLAMA = CallFormat(
    trigger='{"name": "',
    middle='", "parameters": ',
    close="}",
    in_template=('{"name": ', '"parameters": ', "ipython"),
    at_start=True,
)
_MISTRAL = CallFormat(
    trigger="[TOOL_CALLS]",
    middle="[ARGS]",
    separator="[TOOL_CALLS]",
    in_template=("[TOOL_CALLS]", "[ARGS]"),
    short_ids=True,
)
_MISTRAL_LIST = CallFormat(
    trigger="[TOOL_CALLS][",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    separator=", ",
    end="]",
    in_template=("[TOOL_CALLS]",),
    short_ids=True,
)
_DEEPSEEK = CallFormat(
    trigger="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    separator="<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    in_template=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    text_arguments=True,
)
_DEEPSEEK_FENCED = CallFormat(
    trigger=_DEEPSEEK.trigger,
    open="function<｜tool▁sep｜>",
    middle="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
    separator="\n<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    in_template=("<｜tool▁calls▁begin｜>", "```json"),
    text_arguments=True,
)


def _mistral_list(template: str) -> CallFormat:
    """Return the format of Mistral's models that write a list. Some templates have a space before the list."""
    space = " " if "[TOOL_CALLS] [" in template else ""
    return replace(_MISTRAL_LIST, trigger=f"[TOOL_CALLS]{space}[")


# A format comes before those whose markers its templates have as well.
FORMATS = (HERMES, _MISTRAL, _MISTRAL_LIST, _DEEPSEEK_FENCED, _DEEPSEEK, _LLAMA)


def format_of(template: str) -> CallFormat | None:
    """Return the format of the function calls of a chat template; None: the template has none that is known."""
    if "tools" not in template:
        return None
    found = next((each for each in FORMATS if all(map(template.__contains__, each.in_template))), None)
    return _mistral_list(template) if found is _MISTRAL_LIST else found
