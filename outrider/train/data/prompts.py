"""Reads the prompts of a training, and divides them into training and evaluation prompts."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.core.json_lines import Line, read_lines
from outrider.core.prompts import (
    SOURCE_FORM,
    Prompt,
    by_category,
    chat_tokens,
    parse_prompt,
    parse_sourced_prompt,
    text_tokens,
)
from outrider.engine.codec import EncodedPrompt
from outrider.errors import OutriderError
from outrider.llm import LLM

_EVAL_SHARE = 0.05  # of the prompts, if there is no --eval-data
_MAX_EVAL_PROMPTS = 64
_LINE_FORMAT = '{"prompt": "..."} or {"messages": [...]}'


def read_prompts(files: Sequence[str], *, limit: int | None = None, with_sources: bool = False) -> list[Prompt]:
    """Return the prompts of all files, up to the first `limit`. A line without a category has the category "".

    `with_sources`: the lines are for an encoder-decoder target. They have a source, and may have the beginning of the
    output as `prompt`. Lines for other targets may have any fields beside `prompt` or `messages`.

    Raises:
        OutriderError: a file cannot be read, or a line is not a prompt.
    """
    parse, form = (_sourced_prompt, SOURCE_FORM) if with_sources else (_prompt, _LINE_FORMAT)
    return [parse(line) for file in files for line in read_lines(file, form=form)][:limit]


def split(
    prompts: Sequence[Prompt], eval_data: str | None, *, seed: int, with_sources: bool = False
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts for training and those for the evaluation.

    Without the file `eval_data`, a part of `prompts` is held out: first of all prompts that occur
    only once. `with_sources` is that of `read_prompts`, for `eval_data`.

    Raises:
        OutriderError: there are too few prompts.
    """
    if eval_data:
        groups = by_category(read_prompts([eval_data], with_sources=with_sources))
        most = max(_MAX_EVAL_PROMPTS // len(groups), 1)
        return list(prompts), [prompt for group in groups.values() for prompt in group[:most]]
    if len(prompts) < 2:
        raise OutriderError(
            "one prompt is not enough for training and evaluation; give more prompts, or --eval-data FILE"
        )
    shuffled = random.Random(seed).sample(list(prompts), len(prompts))
    counts = Counter(map(_content, shuffled))
    shuffled.sort(key=lambda prompt: counts[_content(prompt)] > 1)
    held_out = min(max(int(len(prompts) * _EVAL_SHARE), 1), _MAX_EVAL_PROMPTS)
    return shuffled[held_out:], shuffled[:held_out]


def count_repeated(train_prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> int:
    """Return the number of evaluation prompts that are also training prompts."""
    train_contents = set(map(_content, train_prompts))
    return sum(_content(prompt) in train_contents for prompt in eval_prompts)


def encode_prompt(tokenizer: Any, prompt: Prompt, *, whole: bool = False) -> tuple[int, ...]:
    """Return the tokens of a prompt, at least one.

    With `whole` the prompt is a complete text: messages get no start of an answer.

    Raises:
        OutriderError: the prompt has no tokens, or the model has no chat template for its messages.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None) is None:
        raise OutriderError(f"{prompt.id} has messages, and this target has no chat template; give prompt instead")
    try:
        if prompt.messages is None:
            tokens = text_tokens(tokenizer, prompt.prompt or "")
        else:
            tokens = chat_tokens(tokenizer, prompt.messages, add_generation_prompt=not whole)
    except OutriderError as error:
        raise OutriderError(f"{prompt.id}: {error}") from error
    if not tokens:
        raise OutriderError(f"{prompt.id} has no tokens; give a prompt of at least one")
    return tokens


def encode_sourced_prompt(llm: LLM, prompt: Prompt) -> EncodedPrompt:
    """Return the tokens of a prompt for an encoder-decoder target, and of its source.

    Without a prompt, the output begins with the start tokens of the target.

    Raises:
        OutriderError: the source is too long for the encoder, or the target has no start tokens.
    """
    try:
        return llm.codec.encode_with_source(prompt.prompt, prompt.source)
    except OutriderError as error:
        raise OutriderError(f"{prompt.id}: {error}") from error


def _content(prompt: Prompt) -> str:
    return json.dumps([prompt.prompt, prompt.messages, prompt.source])


def _prompt(line: Line) -> Prompt:
    """Return the prompt of a line. A line of a set for chat models may have both fields: `messages` are used."""
    unused = ("category",) if line.fields.get("messages") is None else ("category", "prompt")
    fields = {name: value for name, value in line.fields.items() if name not in unused}
    prompt = parse_prompt(replace(line, fields=fields))
    return replace(prompt, id=line.where, category=str(line.fields.get("category", "")))


def _sourced_prompt(line: Line) -> Prompt:
    """Return the prompt of a line for an encoder-decoder target."""
    return replace(parse_sourced_prompt(line), id=line.where)
