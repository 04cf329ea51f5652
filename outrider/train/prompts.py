"""Prompts to train on, and some to measure on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import OutriderError
from outrider.prompts import Prompt
from outrider.prompts import read_prompts as read_file

_HELD, _MOST = 0.05, 64  # of the data, where no prompts to measure on are named; and at most


def read_prompts(files: Sequence[str], *, limit: int | None) -> list[Prompt]:
    """All lines of all files; a line without a category is of none.

    Raises:
        OutriderError: a file or a line is not as it should be.
    """
    found = [prompt for file in files for prompt in _lines(Path(file))]
    return found[:limit]


def split(prompts: list[Prompt], held_out: str | None, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """What to train on and what to measure on, which is never the same."""
    if held_out:
        return prompts, read_file(held_out, limit=_MOST // 8)
    shuffled = random.Random(seed).sample(prompts, len(prompts))
    held = min(max(int(len(prompts) * _HELD), 1), _MOST)
    if len(prompts) < 2:
        raise OutriderError("one prompt is not enough to train and to measure; give more, or --held-out FILE")
    return shuffled[held:], shuffled[:held]


def _lines(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{path} cannot be read ({error}); give a file of JSON lines") from error
    out = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            out.append(_prompt(line, f"{path}:{number}", number))
    if not out:
        raise OutriderError(f'{path} holds no prompts; give lines like {{"prompt": "..."}}')
    return out


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise OutriderError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if messages is None and not (isinstance(prompt, str) and prompt):
        raise OutriderError(f'{where}: no prompt; give lines like {{"prompt": "..."}} or {{"messages": [...]}}')
    turns = None
    if messages is not None:
        if not isinstance(messages, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages
        ):
            raise OutriderError(f'{where}: messages must be a list of {{"role": "...", "content": "..."}}')
        turns = tuple({"role": turn["role"], "content": turn["content"]} for turn in messages)
    return Prompt(id=f"line-{number}", category=str(entry.get("category", "")), prompt=prompt, messages=turns)
