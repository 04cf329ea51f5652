"""Prompts to train on, and some to measure on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from outrider.errors import OutriderError
from outrider.measure.prompts import Line, Prompt, by_category, chat_tokens, read_lines, text_tokens, turns

_HELD, _MOST = 0.05, 64  # of the data, where no prompts to measure on are named; and at most
_FORM = '{"prompt": "..."} or {"messages": [...]}'


def read_prompts(files: Sequence[str], *, limit: int | None = None) -> list[Prompt]:
    """All lines of all files, the first `limit` of them; a line without a category is of none.

    Raises:
        OutriderError: a file or a line is not as it should be.
    """
    return [_prompt(line) for file in files for line in read_lines(file, form=_FORM)][:limit]


def split(prompts: Sequence[Prompt], held_out: str | None, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """What to train on, and what to measure on: lines that are not trained on.

    Where none are named, some of the data are taken; a prompt that the data hold once rather than one that comes again.

    Raises:
        OutriderError: there are too few.
    """
    if held_out:
        groups = by_category(read_prompts([held_out]))
        each = max(_MOST // len(groups), 1)
        return list(prompts), [prompt for group in groups.values() for prompt in group[:each]]
    if len(prompts) < 2:
        raise OutriderError("one prompt is not enough to train and to measure; give more, or --eval-data FILE")
    shuffled = random.Random(seed).sample(list(prompts), len(prompts))
    times = Counter(_content(prompt) for prompt in shuffled)
    shuffled.sort(key=lambda prompt: times[_content(prompt)] > 1)
    held = min(max(int(len(prompts) * _HELD), 1), _MOST)
    return shuffled[held:], shuffled[:held]


def repeated(prompts: Sequence[Prompt], held: Sequence[Prompt]) -> int:
    """How many of those to measure on are trained on, too."""
    learned = set(map(_content, prompts))
    return sum(_content(prompt) in learned for prompt in held)


def encoded(tokenizer: Any, prompt: Prompt, *, whole: bool = False) -> tuple[int, ...]:
    """A prompt's tokens, at least one; `whole` where nothing is to follow.

    Raises:
        OutriderError: there are none, or the model has no template that takes its messages.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None) is None:
        raise OutriderError(f"{prompt.id} holds messages, and this target has no chat template; give prompt instead")
    try:
        if prompt.messages is None:
            tokens = text_tokens(tokenizer, prompt.prompt or "")
        else:
            tokens = chat_tokens(tokenizer, prompt.messages, asks=not whole)
    except OutriderError as error:
        raise OutriderError(f"{prompt.id}: {error}") from error
    if not tokens:
        raise OutriderError(f"{prompt.id} has no tokens; give a prompt of at least one")
    return tokens


def _content(prompt: Prompt) -> str:
    return json.dumps([prompt.prompt, prompt.messages])


def _prompt(line: Line) -> Prompt:
    where, fields = line.where, line.fields
    prompt, messages, category = fields.get("prompt"), fields.get("messages"), str(fields.get("category", ""))
    if messages is not None:
        return Prompt(id=where, category=category, prompt=None, messages=turns(messages, where))
    if not isinstance(prompt, str) or not prompt:
        raise OutriderError(f"{where}: no prompt; give lines like {_FORM}")
    return Prompt(id=where, category=category, prompt=prompt, messages=None)
