"""What form a completion must have: a JSON schema, a regular expression, a grammar, or one of some texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError

STYLE: Mapping[str, Any] = MappingProxyType(  # of JSON: as Python's json.dumps writes it
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
_MOST = 128 * 1024  # characters of a constraint
_DEEPEST = 64  # levels of a schema


class Kind(StrEnum):
    """What a constraint is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form of a completion, which holds whatever the model would rather say; max_tokens alone can cut it.

    Only tokens that the form allows have a probability, and end-of-text has one only where the text may end. The law of
    the allowed ones is the model's own, renormalised: what constrained decoding draws token by token.

    JSON is written on one line, as Python's json.dumps writes it; a schema with {"x-guidance": {"whitespace_flexible":
    true}} leaves white space to the model.

    Attributes:
        kind: the language.
        source: the constraint in it: JSON text of a schema, a regular expression (Rust's syntax), a grammar (Lark's
            syntax, as llguidance has it, or GBNF), or a JSON list of texts.
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise OutriderError(f"a constraint's source is {self.source!r}; use a text of at least one character")
        if len(self.source) > _MOST:
            raise OutriderError(
                f"the {self.kind} is {len(self.source)} characters long; use at most {_MOST}, or split the request"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that a schema allows; `schema` is the schema itself, or its JSON text.

        Raises:
            OutriderError: it is no schema.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (json.JSONDecodeError, RecursionError) as error:
                raise OutriderError(f"the JSON schema is not JSON ({error}); give the text of one object") from error
        if not isinstance(schema, Mapping | bool):
            raise OutriderError(f"a JSON schema is an object, and this is {type(schema).__name__}; give an object")
        _check_depth(schema)
        try:
            return cls(kind=Kind.JSON_SCHEMA, source=json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise OutriderError(f"the JSON schema holds what is not JSON ({error}); use plain values") from error

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that matches `pattern` from its beginning to its end."""
        return cls(kind=Kind.REGEX, source=pattern)

    @classmethod
    def grammar(cls, source: str) -> Constraint:
        """A text of a context-free language, in Lark's syntax or in GBNF."""
        return cls(kind=Kind.GRAMMAR, source=source)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of these texts.

        Raises:
            OutriderError: there is none, or one is empty or no text.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise OutriderError(f"choice is {texts!r}; use a list of texts of at least one character each")
        return cls(kind=Kind.CHOICE, source=json.dumps(list(texts)))


def _check_depth(schema: Any) -> None:
    """Raises OutriderError where levels lie deeper in each other than compilers of schemas can follow."""
    level = [schema]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return
    raise OutriderError(f"the JSON schema is more than {_DEEPEST} levels deep; name its parts under $defs, with $ref")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
