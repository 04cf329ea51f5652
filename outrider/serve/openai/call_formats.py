"""The formats in which models are trained to write function calls, found by the chat template of the model."""

import json
from dataclasses import dataclass, replace

from outrider.core.markers import CALL_END, CALL_START, CHANNEL


def quoted(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFormat:
    """How a model writes arguments one by one: `open` name `middle` value `close`.

    Attributes:
        separator: what stands between two arguments.
        text: whether a value that is a string is written as it is, up to `close`. Otherwise values
            are JSON, with Python's names of true, false and null.
    """

    open: str = ""
    middle: str
    close: str = ""
    separator: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls: `trigger` call (`separator` call)* `end`.

    A call is `open` name `middle` arguments `close`. The arguments are JSON, or have the format `param`.

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
    param: ParamFormat | None = None
    separator: str | None = None
    end: str = ""
    in_template: tuple[str, ...]
    at_start: bool = False
    text_arguments: bool = False
    short_ids: bool = False

    def head(self, name: str) -> str:
        """Return how an output begins with a call of this function."""
        return self.trigger + self.open + name + self.middle

    def one_call(self, head: str, arguments: str) -> str:
        """Return the grammar of a call that begins with `head`. `arguments` is the rule of its arguments."""
        close = f" {quoted(self.close)}" if self.close else ""
        return f"{quoted(head)} {arguments}{close}"


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
_XML = CallFormat(
    trigger=CALL_START,
    open="\n<function=",
    middle=">\n",
    close="</function>\n" + CALL_END,
    param=ParamFormat(open="<parameter=", middle=">\n", close="\n</parameter>\n", text=True),
    separator="\n" + CALL_START,
    in_template=(CALL_START, "<function=", "<parameter="),
)
_PYTHONIC = CallFormat(
    trigger="[",
    middle="(",
    close=")",
    param=ParamFormat(middle="=", separator=", "),
    separator=", ",
    end="]",
    in_template=("func_name1(params_name1=",),
    at_start=True,
)
_PYTHONIC_MARKED = replace(
    _PYTHONIC,
    trigger="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    in_template=("<|tool_list_start|>",),
    at_start=False,
)
_HARMONY = CallFormat(
    trigger=f"{CHANNEL}commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    in_template=(f"{CHANNEL}commentary", "to=functions."),
)


def _mistral_list(template: str) -> CallFormat:
    """Return the format of Mistral's models that write a list. Some templates have a space before the list."""
    space = " " if "[TOOL_CALLS] [" in template else ""
    return replace(_MISTRAL_LIST, trigger=f"[TOOL_CALLS]{space}[")


# A format comes before those whose markers its templates have as well.
FORMATS = (
    _XML,
    _HARMONY,
    _PYTHONIC,
    _PYTHONIC_MARKED,
    HERMES,
    _MISTRAL,
    _MISTRAL_LIST,
    _DEEPSEEK_FENCED,
    _DEEPSEEK,
    _LLAMA,
)


def format_of(template: str) -> CallFormat | None:
    """Return the format of the function calls of a chat template; None: the template has none that is known."""
    if "tools" not in template:
        return None
    found = next((each for each in FORMATS if all(map(template.__contains__, each.in_template))), None)
    return _mistral_list(template) if found is _MISTRAL_LIST else found
