"""Constraints on the text of a completion: JSON schemas, regular expressions, grammars and lists of choices."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError

STYLE: Mapping[str, Any] = MappingProxyType(  # JSON is formatted as by Python's json.dumps
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
_MAX_LENGTH = 128 * 1024  # characters of a constraint
_MAX_DEPTH = 64  # levels of a schema


class Kind(StrEnum):
    """The language of a constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form that the text of a completion must have. Only max_tokens can cut it short.

    Tokens that the constraint does not allow have probability 0, and so has end-of-text where the text may not end. The
    distribution of the allowed tokens is the model's, renormalized, as in constrained decoding token by token.

    JSON is written on one line, formatted as by Python's json.dumps. A schema with {"x-guidance":
    {"whitespace_flexible": true}} leaves white space to the model.

    Attributes:
        kind: the language.
        source: the constraint itself: JSON text of a schema, a regular expression (Rust's syntax),
            a grammar (Lark's syntax, as llguidance has it, or GBNF), or a JSON list of texts.
        prefix: what comes before the constrained text, as rules of Lark, of which the first is `prefix`; "": nothing.
    """

    kind: Kind
    source: str
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.kind not in tuple(Kind):
            raise OutriderError(f"a constraint's kind is {self.kind!r}; use {', '.join(Kind)}")
        object.__setattr__(self, "kind", Kind(self.kind))  # "regex" means Kind.REGEX
        if not isinstance(self.source, str) or not self.source:
            raise OutriderError(f"a constraint's source is {self.source!r}; use a string of at least one character")
        if len(self.source) > _MAX_LENGTH:
            raise OutriderError(f"the {self.kind} is {len(self.source)} characters long; use at most {_MAX_LENGTH}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """Require JSON that matches a schema. `schema` is the schema or its JSON text.

        Raises:
            OutriderError: `schema` is not a JSON schema.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (json.JSONDecodeError, RecursionError) as error:
                raise OutriderError(
                    f"the JSON schema is not valid JSON ({error}); give the JSON text of an object"
                ) from error
        if not isinstance(schema, Mapping | bool):
            raise OutriderError(f"the JSON schema is {type(schema).__name__}; give an object")
        _check_depth(schema)
        try:
            return cls(kind=Kind.JSON_SCHEMA, source=json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise OutriderError(f"the JSON schema has a value that is not JSON ({error}); use plain values") from error

    @classmethod
    def json_object(cls) -> Constraint:
        """Require a JSON object of any form."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Require a text that matches the whole `pattern`."""
        return cls(kind=Kind.REGEX, source=pattern)

    @classmethod
    def grammar(cls, source: str) -> Constraint:
        """Require a text of a context-free grammar, in the syntax of Lark or GBNF."""
        return cls(kind=Kind.GRAMMAR, source=source)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Require one of these texts.

        Raises:
            OutriderError: the list is empty, or an item is not a non-empty string.
        """
        is_list = isinstance(texts, Collection) and not isinstance(texts, str)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise OutriderError(f"choice is {texts!r}; use a list of non-empty strings")
        return cls(kind=Kind.CHOICE, source=json.dumps(list(texts)))


def _check_depth(schema: Any) -> None:
    """Raise OutriderError if the schema is nested more deeply than its compiler can follow."""
    level = [schema]
    for _ in range(_MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise OutriderError(
        f"the JSON schema is more than {_MAX_DEPTH} levels deep; define its parts under $defs and use $ref"
    )


def _children(value: Any) -> list[Any]:
    """Return the values inside an object or array; [] for other values."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
