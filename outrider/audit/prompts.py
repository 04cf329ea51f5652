"""What the audit lets a model continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

Prompt = str | Sequence[Mapping[str, str]]

# Prose, code, numbers and questions. Short, since the law of a prompt's continuation takes thousands of readings; most
# end in words that occurred before, so that a proposer that copies has something to copy.
DEFAULT: tuple[Prompt, ...] = (
    "In the beginning there was",
    "The sea was calm. The old man said that the sea was",
    "def area(a, b):\n    return a * b\n\n\ndef sum(a, b):\n    return",
    "one two three one two three one",
    "Question: What is the largest planet?\nAnswer: The largest",
    "The committee met in March, and the committee",
)


def read_prompts(path: str | None) -> tuple[Prompt, ...]:
    """Prompts of a JSONL file, one object with `prompt` or `messages` per line; None gives the default ones.

    Raises:
        OutriderError: the file cannot be read, or a line is neither; the message names the line.
    """
    if path is None:
        return DEFAULT
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{path} cannot be read ({error}); give a JSONL file of prompts") from error
    prompts = tuple(_parse(line, f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise OutriderError(f"{path} holds no prompts; give one JSON object with prompt or messages per line")
    return prompts


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """A prompt's tokens: plain text as it is, messages under the model's chat template."""
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif getattr(tokenizer, "chat_template", None) is None:
        raise OutriderError("this model has no chat template; give prompts as plain text, in the field prompt")
    else:
        turns = [dict(message) for message in prompt]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise OutriderError("a prompt is empty; give at least one token")
    return tuple(tokens)


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise OutriderError(
            f"{where} is not JSON ({error}); give one object with prompt or messages per line"
        ) from None
    prompt = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_turn(turn) for turn in prompt):
        return tuple(prompt)
    raise OutriderError(f"{where} has neither a prompt (a text) nor messages (objects with role and content)")


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
