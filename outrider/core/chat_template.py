"""Renders the chat templates of checkpoints as transformers does, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which templates read reasoning


def render(template: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """Return a conversation as text.

    Args:
        messages: the messages. Keys with the value None are left out.
        values: what else the template can read, such as `tools` and `bos_token`.

    Raises:
        TemplateError: the template is invalid, or refuses the messages. A template may raise other errors, too.
    """
    return _compiled(template).render(messages=list(map(_message, messages)), **values)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message without empty keys, and with its reasoning under all names."""
    copy = {name: value for name, value in message.items() if value is not None}
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    return copy if reasoning is None else {**dict.fromkeys(_REASONING, reasoning), **copy}


class _Generation(Extension):
    """The tag `generation`, which marks what the assistant writes. It has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace whose attributes do not begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"chat templates cannot set the attribute {name!r}")
        super().__setitem__(name, value)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": _PublicNamespace,
    }
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON that is not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
