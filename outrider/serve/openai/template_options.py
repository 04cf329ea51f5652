"""The variables of a chat template that a request sets, such as `enable_thinking`."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from outrider.core.params import InvalidParam
from outrider.serve.openai.reasoning import reasoning_of

_ENABLE = ("enable_thinking", "thinking")  # names of the variable that turns reasoning on and off
_GIVEN = frozenset(  # variables that the server or the tokenizer sets
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
    }
)


def template_options(
    template: str, *, options: Mapping[str, Any], enable: bool | None, effort: str | None
) -> dict[str, Any]:
    """Return the variables of a chat template that a request sets.

    Args:
        template: the chat template.
        options: `chat_template_kwargs` of the request.
        enable: `enable_thinking` of the request.
        effort: `reasoning_effort` of the request. "none" turns reasoning off.

    Raises:
        InvalidParam: the template does not read one of them, or two fields differ.
    """
    known = template_variables(template)
    for name in options:
        if name not in known:
            others = f"; it reads {', '.join(sorted(known))}" if known else ""
            raise InvalidParam(
                "chat_template_kwargs",
                f"chat_template_kwargs: the model's chat template does not read {name!r}{others}; remove it",
            )
    chosen = dict(options)
    if reasoning_of(template, "") is None:  # such a model never reasons
        enable = enable or None
        effort = None if effort == "none" else effort
    switch = next((name for name in _ENABLE if name in known), None)
    if enable is not None:
        _set(chosen, switch, enable, "enable_thinking")
    if effort is not None and "reasoning_effort" in known:
        _set(chosen, "reasoning_effort", effort, "reasoning_effort")
    elif effort is not None:
        _set(chosen, switch if effort == "none" else None, False, "reasoning_effort")
    return chosen


def reads_thinking(template: str) -> bool:
    """Return whether a request may set `enable_thinking` to either value."""
    return reasoning_of(template, "") is not None and not template_variables(template).isdisjoint(_ENABLE)


@lru_cache(maxsize=16)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a request may set in a chat template; none if it is invalid."""
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # tags of transformers, without variables
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed)) - _GIVEN


def _set(options: dict[str, Any], name: str | None, value: Any, field: str) -> None:
    """Set a variable for a field of the request. `name` is None if the template has no such variable."""
    if name is None:
        raise InvalidParam(field, f"{field}: the model's chat template does not read it; leave it out")
    if options.setdefault(name, value) != value:
        raise InvalidParam(field, f"{field} is {value!r}, and another field says otherwise; give one of them")
