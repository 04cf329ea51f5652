"""Encodes prompts. Long ones are encoded in a thread, so that streams do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from outrider.llm import LLM, Prompt

_LONG = 20_000  # characters; encoding them takes some milliseconds
_Tokens = tuple[int, ...]


def with_own_tokenizer(llm: LLM) -> LLM:
    """Return the same models with a copy of the tokenizer, which is not thread-safe."""
    parts = llm.parts
    return LLM.from_parts(replace(parts, setup=replace(parts.setup, tokenizer=deepcopy(parts.tokenizer))))


class PromptEncoder:
    """Encodes prompts for one event loop."""

    def __init__(self, front: LLM) -> None:
        """Use the tokenizer of `front`, which belongs to the event loop."""
        self._front, self._apart = front, with_own_tokenizer(front)
        self._reading = asyncio.Lock()

    async def encode(self, prompt: Prompt) -> _Tokens:
        """Return the tokens of a prompt."""
        length = len(prompt) if isinstance(prompt, str) else 0
        return await self._read(lambda llm: llm.encode(prompt), length)

    async def chat(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> _Tokens:
        """Return the tokens of a conversation. Raises as `LLM.encode_chat` does."""
        length = sum(len(str(turn.get("content") or "")) for turn in turns)
        return await self._read(lambda llm: llm.encode_chat(turns, tools), length)

    async def _read(self, how: Callable[[LLM], _Tokens], length: int) -> _Tokens:
        if length < _LONG:
            return how(self._front)
        async with self._reading:
            return await asyncio.to_thread(how, self._apart)
