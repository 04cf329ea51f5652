"""Prompts from JSON lines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from outrider.core.text import is_utf8
from outrider.errors import OutriderError

EMBEDDED = Path(__file__).parent / "prompts.jsonl"
_FORM = '{"category": "...", "prompt": "..."} or "messages" in place of "prompt"'
_NAMELESS = "prompts"  # the category of those that name none


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An object of a file of JSON lines."""

    where: str  # file and number, for people
    number: int  # of the line, from 1
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: plain text, or a conversation for the model's chat template."""

    id: str
    category: str
    prompt: str | None
    messages: tuple[dict[str, str], ...] | None


def read_prompts(file: str | Path | None = None, *, limit: int | None = None) -> list[Prompt]:
    """Prompts to measure on, of a file of JSON lines: the first `limit` of each category.

    A line holds either `prompt` or `messages`; `category` and `id` are optional, and other fields are left alone.

    Raises:
        OutriderError: the file cannot be read, or a line is not as it should be; the message has its number.
    """
    if limit is not None and limit < 1:
        raise OutriderError(f"limit is {limit}; use at least 1")
    found = [_parse(line) for line in read_lines(file or EMBEDDED, form=_FORM)]
    return [prompt for group in by_category(found).values() for prompt in group[:limit]]


def read_lines(file: str | Path, *, form: str) -> Iterator[Line]:
    """The objects of a file of JSON lines, at least one; `form` says what they should look like.

    Raises:
        OutriderError: the file cannot be read, or a line is no object; the message has its number.
    """
    path = Path(file).expanduser()
    try:  # some editors open a file with a mark of its encoding, and a text may hold other ends of lines than this one
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise OutriderError(f"{path} is not UTF-8 text; give a file of JSON lines") from error
    full = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not full:
        raise OutriderError(f"{path} holds no prompts; give lines like {form}")
    for number, line in full:
        where = f"{path}:{number}"
        yield Line(where=where, number=number, fields=_fields(line, where, form))


def read_json(line: str, where: str) -> Any:
    """What a line of JSON says.

    Raises:
        OutriderError: it is none, or has text in it that is none; the message begins with `where`.
    """
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise OutriderError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise OutriderError(f"{where}: JSON that cannot be read ({error}); leave the line out") from error
    if "\\u" in line and not is_utf8(json.dumps(entry, ensure_ascii=False)):
        raise OutriderError(f"{where}: half a character, of those from \\ud800 to \\udfff; leave it out")
    return entry


def turns(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    """A conversation for a chat template.

    Raises:
        OutriderError: it is none.
    """
    if not isinstance(messages, list) or not messages or not all(map(is_turn, messages)):
        raise OutriderError(f'{where}: messages must be a list of {{"role": "...", "content": "..."}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def is_turn(message: Any) -> bool:
    """Whether it has a role and content, both texts."""
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    asks: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """A conversation in the words of the model's chat template; `asks` where the assistant's turn is to follow.

    Raises:
        OutriderError: the template refuses it, as some do a system's turn, or cannot read it.
    """
    turns = [dict(message) for message in messages]
    given = {"tools": list(tools)} if tools else {}
    try:
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=asks, tokenize=False, **given))
    except (TemplateError, TypeError, ValueError) as error:
        raise OutriderError(f"the model's chat template does not take these messages ({error}); change them") from error


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    asks: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[int, ...]:
    """The tokens of `chat_text`, which has all special ones in it already."""
    return text_tokens(tokenizer, chat_text(tokenizer, messages, asks=asks, tools=tools), special=False)


def text_tokens(tokenizer: Any, text: str, *, special: bool = True) -> tuple[int, ...]:
    """A text's tokens; with `special` those too that the tokenizer puts around it of its own accord.

    Raises:
        OutriderError: it holds half of a surrogate pair, which no text does.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(
            f"the text holds half of a surrogate pair, {text[error.start]!a} at character {error.start}; leave it out"
        ) from None
    # Whether it is too long is ours to say; the tokenizer's own warning speaks of errors that do not follow.
    return tuple(tokenizer.encode(text, add_special_tokens=special, verbose=False))


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts under their categories, both in the order of appearance."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    return dict(groups)


def _fields(line: str, where: str, form: str) -> dict[str, Any]:
    entry = read_json(line, where)
    if not isinstance(entry, dict):
        raise OutriderError(f"{where}: not a JSON object; use {form}")
    return entry


def _parse(line: Line) -> Prompt:
    where, fields = line.where, line.fields
    category, prompt, messages = fields.get("category", _NAMELESS), fields.get("prompt"), fields.get("messages")
    if not isinstance(category, str) or not category:
        raise OutriderError(f"{where}: category must be a string of at least one character; change it, or leave it out")
    if (prompt is None) == (messages is None):
        raise OutriderError(f"{where}: give one of prompt and messages; use {_FORM}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise OutriderError(f"{where}: prompt must be a string of at least one character")
    name = str(fields.get("id", f"line-{line.number}"))
    talk = None if messages is None else turns(messages, where)
    return Prompt(id=name, category=category, prompt=prompt, messages=talk)
