"""Read the fields of structures from the C++ sources of the kernels, which declare them.

So a structure has the same layout in Python and in the compiled kernels.
"""

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

SOURCES = Path(__file__).parents[1] / "models" / "native" / "csrc"
_NUMBERS: Mapping[str, type] = MappingProxyType({"int32_t": ctypes.c_int32, "float": ctypes.c_float})
_DECLARATION = re.compile(r"\s*(?:const )?(\w+)(.*)")  # a type and the names
_NAME = re.compile(r"((?:\*|const\b|\s)*)(\w+)")


def declared_fields(file: str, structure: str, /, **types: type) -> list[tuple[str, type[Any]]]:
    """Return the fields of a C++ structure, as `ctypes.Structure` takes them.

    Args:
        file: the source that declares the structure, in `SOURCES`.
        structure: its name in C++.
        types: of its fields, by their names in C++. Pointers, int32_t and float need none.

    Raises:
        RuntimeError: the source does not declare the structure, or a field is not of these types.
    """
    found = re.search(rf"struct {structure} {{(.*?)}};", _code(file), re.DOTALL)
    if found is None:
        raise RuntimeError(f"{file} declares no structure {structure}; name the source that does")
    known = {**_NUMBERS, **types}
    fields: list[tuple[str, type[Any]]] = []
    for declaration in filter(str.strip, found[1].split(";")):
        kind, names = _matched(_DECLARATION, declaration, structure)
        for name in names.split(","):
            pointer, field = _matched(_NAME, name, structure)
            if "*" not in pointer and kind not in known:
                raise RuntimeError(f"the field {field} of {structure} has type {kind}; say what type of ctypes that is")
            fields.append((field, ctypes.c_void_p if "*" in pointer else known[kind]))
    return fields


def _matched(pattern: re.Pattern[str], text: str, structure: str) -> tuple[str | Any, ...]:
    match = pattern.fullmatch(text)
    if match is None:
        raise RuntimeError(f"{structure} has the field {text.strip()}; declare pointers, numbers or structures")
    return match.groups()


@cache
def _code(file: str) -> str:
    """Return a source without its comments."""
    return re.sub(r"//.*", "", (SOURCES / file).read_text())
