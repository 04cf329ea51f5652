"""The base of all request bodies: null is absent, and unknown fields are errors."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from outrider.core.text import is_utf8
from outrider.errors import either

_NULL = {"type": "null"}
_UNUSED = "x-unused"  # key of the schema of a field that has no effect, for /docs
_ANNOTATIONS = ("title", "description", "default", _UNUSED)  # keys that belong to the field, not to its type


def _describe_nulls(schema: dict[str, Any]) -> None:
    """Say in a JSON schema that every optional field, and every unknown one, may be null."""
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    for name, field in properties.items():
        if name not in required:
            properties[name] = _nullable(field)
    schema["additionalProperties"] = _NULL


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that may be null as well."""
    annotations = {key: field[key] for key in _ANNOTATIONS if key in field}
    kind = {key: value for key, value in field.items() if key not in annotations}
    if not kind or kind == _NULL:
        return field
    alternatives = kind["anyOf"] if kind.keys() == {"anyOf"} else [kind]
    if _NULL in alternatives:
        return field
    return {"anyOf": [*alternatives, _NULL], **annotations}


class StrictModel(BaseModel):
    """A model without conversion of types and without unknown fields. A field that is null is absent.

    OpenAI's API makes most fields nullable, and many clients send all of their fields. Null asks
    for nothing, so it is also accepted for a field that the server does not know.
    """

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe_nulls)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: each for name, each in value.items() if each is not None or name in required}


class RequestBody(StrictModel):
    """Base of all request bodies. Every string must be valid UTF-8."""

    @model_validator(mode="before")
    @classmethod
    def _check_strings(cls, value: Any) -> Any:
        _check_utf8(value)
        return value


@dataclass(frozen=True, slots=True)
class Unused:
    """Annotates a field of other servers that has no effect here.

    Attributes:
        values: the values that ask for what this server does in any case; None: every value has no
            effect on the output. Other values would change the output, so they are errors.
        instead: for the error message, what to send in place of the field.
    """

    values: tuple[Any, ...] | None = None
    instead: str = ""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema: dict[str, Any] = {_UNUSED: True}
        if self.values is None:
            return schema
        return schema | ({"enum": list(self.values)} if self.values else _NULL)

    def _check(self, value: Any) -> Any:
        if self.values is None or any(_equal(value, each) for each in self.values):
            return value
        ways = ["remove it", *(f"send {json.dumps(each)}" for each in self.values)]
        ways += [self.instead] if self.instead else []
        message = f"this server does not honor it; {', '.join(ways[:-1])}{', or ' if ways[1:] else ''}{ways[-1]}"
        raise PydanticCustomError("not_honored", "{message}", {"message": message})  # the message may have braces


def type_discriminator(*types: str, default: str = "") -> Discriminator:
    """Return what chooses the model of an object by its `type`. Tags are in brackets: no names of fields."""

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"[{kind}]"

    message = f"use an object of a type that this server supports: {either(types)}"
    return Discriminator(tag, custom_error_type="unknown_type", custom_error_message=message)


def described(forms: str) -> WrapValidator:
    """Return an annotation for a union of types, whose error names all `forms` in place of the first one."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("described", "use {forms}", {"forms": forms}) from None

    return WrapValidator(check)


def unused_fields(model: BaseModel, path: str = "") -> list[str]:
    """Return the fields of a body that have no effect, such as `service_tier` and `messages.annotations`."""
    return list(dict.fromkeys(_unused_fields(model, path)))


def _unused_fields(model: BaseModel, path: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        if name not in model.model_fields_set:
            continue
        if any(isinstance(each, Unused) for each in field.metadata):
            yield path + name
            continue
        value = getattr(model, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                yield from _unused_fields(each, f"{path}{name}.")


def _equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. In Python, true equals 1."""
    return bool(isinstance(value, bool) == isinstance(other, bool) and value == other)


def _check_utf8(value: Any, *path: str) -> None:
    """Check all strings of a JSON value. `path` is where the value is in the body."""
    if isinstance(value, str):
        if not is_utf8(value):
            message = "a string has a lone surrogate, which is not valid UTF-8; send both halves of the pair"
            raise PydanticCustomError("invalid_utf8", message, {"path": path})
    elif isinstance(value, dict):
        for name, field in value.items():
            _check_utf8(name, *path)
            _check_utf8(field, *path, name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if not isinstance(item, int):  # token ids, of which there may be many
                _check_utf8(item, *path, str(i))
