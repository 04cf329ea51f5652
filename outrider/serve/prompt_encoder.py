"""Encodes prompts. Long prompts are encoded in a thread, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from outrider.core.params import InvalidParam
from outrider.core.types import SpeechOutput
from outrider.llm import LLM, EncodedSource, Prompt
from outrider.models.torch.speech.audio import Audio, hear
from outrider.models.torch.speech.wav import read_wav
from outrider.serve.speech.session import speech_rules

_LONG_PROMPT = 20_000  # characters; encoding them takes some milliseconds
_Tokens = tuple[int, ...]
_Encoded = TypeVar("_Encoded")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedInput:
    """The tokens of a prompt, and the source for an encoder-decoder model."""

    prompt: _Tokens
    source: EncodedSource | None = None
    speech_output: SpeechOutput = SpeechOutput.TEXT  # of a speech model


def with_own_tokenizer(llm: LLM) -> LLM:
    """Return an `LLM` with the same models and a copy of the tokenizer, which is not thread-safe."""
    parts = llm.parts
    return LLM.from_parts(replace(parts, setup=replace(parts.setup, tokenizer=deepcopy(parts.tokenizer))))


class PromptEncoder:
    """Encodes prompts for one event loop."""

    def __init__(self, frontend: LLM) -> None:
        """Use the tokenizer of `frontend`, which no other thread uses."""
        self._frontend = frontend
        self._thread_llm = with_own_tokenizer(frontend)  # for long prompts
        self._thread_lock = asyncio.Lock()
        self._audio_lock = asyncio.Lock()  # one recording at a time, because long ones take memory

    async def encode(self, prompt: Prompt) -> _Tokens:
        """Return the tokens of a prompt."""
        length = len(prompt) if isinstance(prompt, str) else 0
        return await self._encode(lambda llm: llm.encode(prompt), length)

    async def encode_source(self, source: Prompt) -> _Tokens:
        """Return the tokens of the source of an encoder-decoder model that reads text.

        Raises:
            InvalidParam: the model reads speech. `LLM.encode_source` would take a text as the path of a file.
        """
        rules = self._frontend.parts.source_rules
        if rules is not None and rules.speech is not None:
            raise InvalidParam("source", "this model transcribes audio; send a file to /v1/audio/transcriptions")
        length = len(source) if isinstance(source, str) else 0
        encoded = await self._encode(lambda llm: llm.encode_source(source), length)
        assert isinstance(encoded, tuple)
        return encoded

    async def hear(self, data: bytes, name: str, *, timestamps: bool) -> Audio:
        """Return the features of a WAV file, for a speech model. See `outrider.models.torch.speech.audio.hear`.

        Raises:
            OutriderError: it is no WAV file, or does not fit the model.
        """
        rules = speech_rules(self._frontend)
        async with self._audio_lock:
            return await asyncio.to_thread(lambda: hear(read_wav(data, name), rules, timestamps=timestamps))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> _Tokens:
        """Return the tokens of a conversation. Raises as `LLM.encode_chat` does."""
        length = sum(len(str(message.get("content") or "")) for message in messages)

        def encode(llm: LLM) -> _Tokens:
            return llm.encode_chat(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )

        return await self._encode(encode, length)

    async def _encode(self, encode: Callable[[LLM], _Encoded], length: int) -> _Encoded:
        """Call `encode`, in a thread if the prompt is long. `length` is its number of characters."""
        if length < _LONG_PROMPT:
            return encode(self._frontend)
        async with self._thread_lock:
            return await asyncio.to_thread(encode, self._thread_llm)
