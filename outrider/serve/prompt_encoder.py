"""Prompts become tokens: long ones elsewhere, so that no stream waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from outrider.llm import LLM, Prompt

_LONG = 20_000  # characters, which take some milliseconds
_Tokens = tuple[int, ...]


def with_own_tokenizer(llm: LLM) -> LLM:
    """The same models; a tokenizer must not be used by two threads at once."""
    parts = llm.parts
    return LLM.from_parts(replace(parts, setup=replace(parts.setup, tokenizer=deepcopy(parts.tokenizer))))


class PromptEncoder:
    """Reads for one event loop."""

    def __init__(self, front: LLM) -> None:
        """`front` is the event loop's own."""
        self._front, self._apart = front, with_own_tokenizer(front)
        self._reading = asyncio.Lock()

    async def encode(self, prompt: Prompt) -> _Tokens:
        """A prompt's tokens."""
        length = len(prompt) if isinstance(prompt, str) else 0
        return await self._read(lambda llm: llm.encode(prompt), length)

    async def chat(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> _Tokens:
        """Those of a conversation, by the model's template; raises as `LLM.encode_chat` does."""
        length = sum(len(str(turn.get("content") or "")) for turn in turns)
        return await self._read(lambda llm: llm.encode_chat(turns, tools), length)

    async def _read(self, how: Callable[[LLM], _Tokens], length: int) -> _Tokens:
        if length < _LONG:
            return how(self._front)
        async with self._reading:
            return await asyncio.to_thread(how, self._apart)
