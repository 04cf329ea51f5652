"""Conversations of several turns, in which the target answers each message of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.lab.common.jobs import encode_prompt

if TYPE_CHECKING:
    from outrider.llm import LLM


def each_turn(llm: LLM, prompts: Sequence[Prompt], *, max_tokens: int) -> list[Prompt]:
    """Return a prompt for each turn of each conversation. The turns before it have the answers of the target.

    The answers are those of greedy plain decoding, so that all variants get the same prompts.

    Args:
        prompts: prompts, some with `later` messages of the user.
        max_tokens: of an answer.

    Raises:
        OutriderError: a conversation does not fit into the context.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, k=0)
    turns = list(prompts)
    waiting = [prompt for prompt in prompts if prompt.later]
    while waiting:
        answers = llm.generate([encode_prompt(llm, prompt) for prompt in waiting], params)
        waiting = [_next(prompt, answer.text) for prompt, answer in zip(waiting, answers, strict=True)]
        turns += waiting
        waiting = [prompt for prompt in waiting if prompt.later]
    return turns


def _next(prompt: Prompt, answer: str) -> Prompt:
    """Return the next turn of a conversation."""
    question, *later = prompt.later
    said = ({"role": "assistant", "content": answer}, {"role": "user", "content": question})
    return replace(prompt, messages=(*(prompt.messages or ()), *said), later=tuple(later))
