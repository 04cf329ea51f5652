"""Makes records from JSON."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")


def from_json(kind: type[_Record], document: Mapping[str, Any]) -> _Record:
    """Return the record of a JSON document that was made with `dataclasses.asdict`.

    Fields may be JSON values, records, tuples and mappings of them, and None. Other names of the document are ignored.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _value(hint, document[name]) for name, hint in hints.items() if name in document})


def _value(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        types = [each for each in get_args(kind) if each is not NoneType]
        kind = types[0] if len(types) == 1 else Any  # such as int | str, which JSON keeps
    if value is None:
        return None
    if is_dataclass(kind):
        return from_json(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is Mapping:
        return {name: _value(get_args(kind)[1], each) for name, each in value.items()}
    return value
