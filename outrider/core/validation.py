"""Says how to fix a value that pydantic has rejected."""

from collections.abc import Mapping
from typing import Any

# By the type of pydantic's error: what the value must be.
_EXPECTED = {
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "finite_number": "a finite number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_pattern_mismatch": "text that matches {pattern}",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
}
# The types of a JSON value in words. Booleans come first, since they are integers in Python.
_KINDS = (
    (bool, "a boolean"),
    (int, "a number"),
    (float, "a decimal number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


def expected(error: Mapping[str, Any]) -> str | None:
    """Return what the value of a validation error must be; None: this type of error does not tell."""
    form = _EXPECTED.get(error["type"])
    limits = error.get("ctx", {}).items()
    return form and form.format(**{key: f"{each:.15g}" if isinstance(each, float) else each for key, each in limits})


def mistake(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field of a JSON document and how to fix it, without the name of the field."""
    if error["type"] == "missing":
        return "this field is missing; add it"
    if error["type"] == "extra_forbidden":
        return "this field is unknown; remove it, or check its spelling"
    fix = expected(error)
    if fix is None:
        return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])
    kind = next((words for types, words in _KINDS if isinstance(error["input"], types)), None)
    if kind and error["type"].endswith(("_type", "_parsing")):
        return f"use {fix}, not {kind}"
    return f"use {fix}"
