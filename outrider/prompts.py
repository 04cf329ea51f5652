"""Prompts to measure on, from JSON lines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

EMBEDDED = Path(__file__).parent / "prompts.jsonl"
_FORM = '{"category": "...", "prompt": "..."} or "messages" in place of "prompt"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: plain text, or a conversation for the model's chat template."""

    id: str
    category: str
    prompt: str | None
    messages: tuple[dict[str, str], ...] | None


def read_prompts(file: str | Path | None = None, *, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file of JSON lines, the first `limit` of each category.

    A line holds `category`, and either `prompt` or `messages`; `id` is optional, and other fields are left alone.

    Raises:
        OutriderError: the file cannot be read, or a line is not as it should be; the message has its number.
    """
    path = Path(file or EMBEDDED)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise OutriderError(f"{path} is not UTF-8 text; give a file of JSON lines") from error
    found = [_parse(line, f"{path}:{i}", i) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise OutriderError(f"{path} holds no prompts; give lines like {_FORM}")
    return [prompt for group in by_category(found).values() for prompt in group[:limit]]


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts under their categories, both in the order of appearance."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    return dict(groups)


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise OutriderError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict):
        raise OutriderError(f"{where}: not a JSON object; use {_FORM}")
    category, prompt, messages = entry.get("category"), entry.get("prompt"), entry.get("messages")
    if not isinstance(category, str) or not category:
        raise OutriderError(f"{where}: no category; use {_FORM}")
    if (prompt is None) == (messages is None):
        raise OutriderError(f"{where}: give one of prompt and messages; use {_FORM}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise OutriderError(f"{where}: prompt must be a string of at least one character")
    name = str(entry.get("id", f"line-{number}"))
    turns = None if messages is None else _turns(messages, where)
    return Prompt(id=name, category=category, prompt=prompt, messages=turns)


def _turns(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    good = isinstance(messages, list) and messages and all(_is_turn(message) for message in messages)
    if not good:
        raise OutriderError(f'{where}: messages must be a list of {{"role": "...", "content": "..."}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))
