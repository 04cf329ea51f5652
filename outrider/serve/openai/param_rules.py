"""The grammar of arguments that a model writes one by one, and what they are as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from outrider.core.constraint import STYLE
from outrider.serve.openai.call_formats import ParamFormat, quoted

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that matches a schema."""
    return f"%json {json.dumps({'x-guidance': dict(STYLE)} | dict(schema))}"


def param_rules(name: str, schema: Mapping[str, Any], format: ParamFormat) -> list[str]:
    """Return the grammar of the arguments of a function. The rule `name` is all of them, required ones first.

    A schema without properties takes arguments of any name. The grammar needs the rule `text`: a text and what
    closes it.
    """
    properties = schema.get("properties") or {}
    required = [key for key in properties if key in schema.get("required", ())]
    optional = [key for key in properties if key not in required]
    if not properties:
        if schema.get("additionalProperties", True) is False:
            return [f'{name}: ""']
        key = f"{quoted(format.open)} /[A-Za-z_][A-Za-z0-9_]*/ {quoted(format.middle)}"
        again = f"({quoted(format.separator)} {name}_0)*"
        return [f"{name}: ({name}_0 {again})?", f"{name}_0: {key} {_value({}, format)}"]
    rule_of = {key: f"{name}_{i}" for i, key in enumerate(properties)}
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    rules = [
        f"{rule_of[key]}: {quoted(format.open + key + format.middle)} {_value(shared | dict(each), format)}"
        for key, each in properties.items()
    ]
    parts = _sequence([rule_of[key] for key in required], [rule_of[key] for key in optional], format)
    return [f"{name}: {parts}", *rules]


def json_value(text: str) -> str:
    """Return a value as JSON: JSON itself, a constant of Python, or a text."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return _PYTHON.get(text) or json.dumps(text, ensure_ascii=False)
    return text


def is_text(schema: Mapping[str, Any] | None, key: str) -> bool:
    """Return whether an argument is a string, so that its value is no JSON."""
    properties: Mapping[str, Any] = (schema or {}).get("properties") or {}
    return bool(properties.get(key, {}).get("type") == "string")


def _value(schema: Mapping[str, Any], format: ParamFormat) -> str:
    """Return the grammar of a value and what closes it."""
    close = quoted(format.close)
    if format.text and (schema.get("type") == "string" or not schema):
        choices = schema.get("enum")
        return f"({' | '.join(map(quoted, choices))}) {close}" if choices else "text"
    if not format.text and schema.get("type") == "boolean":
        return f'("True" | "False") {close}'
    return f"{json_rule(schema)} {close}"


def _sequence(required: list[str], optional: list[str], format: ParamFormat) -> str:
    """Return the grammar of all required and some optional parts, in this order."""
    separator = f"{quoted(format.separator)} " if format.separator else ""
    rest = [f"({separator}{each})?" for each in optional]
    if required:
        return " ".join([f" {separator}".join(required), *rest])
    starts = [" ".join([each, *rest[i + 1 :]]) for i, each in enumerate(optional)]
    return f"({' | '.join(starts)})?"
