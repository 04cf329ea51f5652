"""Read files of JSON lines: one JSON object per line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.text import is_utf8, read_text
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One JSON object of a JSON Lines file."""

    where: str  # FILE:NUMBER, for error messages
    number: int  # of the line, from 1
    fields: dict[str, Any]


def read_lines(file: str | Path, *, form: str) -> Iterator[Line]:
    """Yield the objects of a JSON Lines file. There is at least one.

    Args:
        form: an example of a valid line, for error messages.

    Raises:
        OutriderError: the file cannot be read, or a line is not an object; the message has the line number.
    """
    path = Path(file).expanduser()
    # Only \n ends a line, because a string may contain other line separators of Unicode.
    lines = read_text(path, str(path), fix="give a file of JSON lines").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise OutriderError(f"{path} holds no prompts; give lines like {form}")
    for number, line in numbered:
        where = f"{path}:{number}"
        fields = read_json(line, where, form=form)
        if not isinstance(fields, dict):
            raise OutriderError(f"{where}: not a JSON object; write one object per line, like {form}")
        yield Line(where=where, number=number, fields=fields)


def read_json(line: str, where: str, *, form: str) -> Any:
    """Return the value of a line of JSON. `form` is an example of a valid line, for error messages.

    Raises:
        OutriderError: the line is not JSON, or a string in it is not valid Unicode; the message begins with `where`.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        if line.lstrip()[0] not in "{[":
            reason = "plain text and CSV are not read"
        raise OutriderError(f"{where}: not JSON ({reason}); write one JSON object per line, like {form}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or very deep nesting
        raise OutriderError(f"{where}: JSON that cannot be read ({error}); remove the line") from error
    if "\\u" in line and not is_utf8(json.dumps(value, ensure_ascii=False)):
        raise OutriderError(f"{where}: the text has half of a surrogate pair (\\ud800 to \\udfff); remove it")
    return value
