"""Encodes prompts. Long prompts are encoded in a thread, beside the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from outrider.core.params import InvalidParam
from outrider.engine.codec import EncodedPrompt, Prompt, TextCodec
from outrider.models.torch.speech.audio import Audio, hear
from outrider.models.torch.speech.wav import read_wav
from outrider.serve.speech.session import speech_rules

_LONG_PROMPT = 20_000  # characters; encoding them takes some milliseconds
_Tokens = tuple[int, ...]
_Encoded = TypeVar("_Encoded")


class PromptEncoder:
    """Encodes prompts for one event loop."""

    def __init__(self, codec: TextCodec) -> None:
        """Encode with `codec`, which no other thread uses."""
        self._codec = codec
        self._thread_codec = codec.copy()  # for long prompts
        self._thread_lock = asyncio.Lock()
        self._audio_lock = asyncio.Lock()  # one recording at a time, because long ones take memory

    async def encode(self, prompt: Prompt) -> _Tokens:
        """Return the tokens of a prompt. Raises as `TextCodec.encode` does."""
        return await self._encode(lambda codec: codec.encode(prompt), _num_chars(prompt))

    async def encode_with_source(self, prompt: Prompt | None, source: Prompt | None) -> EncodedPrompt:
        """Return the tokens of a prompt and of the source of an encoder-decoder model that reads text.

        Raises:
            InvalidParam: the model reads speech. `TextCodec.encode_source` would take a text as the
                path of a file.
            OutriderError: as `TextCodec.encode_with_source` does.
        """
        if source is not None and self._codec.speech_rules is not None:
            raise InvalidParam("source", "this model transcribes audio; send a file to /v1/audio/transcriptions")
        length = _num_chars(prompt) + _num_chars(source)
        return await self._encode(lambda codec: codec.encode_with_source(prompt, source), length)

    async def hear(self, data: bytes, name: str, *, timestamps: bool) -> Audio:
        """Return the features of a WAV file, for a speech model. See `outrider.models.torch.speech.audio.hear`.

        Raises:
            OutriderError: it is no WAV file, or does not fit the model.
        """
        rules = speech_rules(self._codec)
        async with self._audio_lock:
            return await asyncio.to_thread(lambda: hear(read_wav(data, name), rules, timestamps=timestamps))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> _Tokens:
        """Return the tokens of a conversation. Raises as `TextCodec.encode_chat` does."""
        length = sum(len(str(message.get("content") or "")) for message in messages)

        def encode(codec: TextCodec) -> _Tokens:
            return codec.encode_chat(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=options,
            )

        return await self._encode(encode, length)

    async def _encode(self, encode: Callable[[TextCodec], _Encoded], length: int) -> _Encoded:
        """Return what `encode` returns. It runs in a thread if the prompt is long; `length` counts its characters."""
        if length < _LONG_PROMPT:
            return encode(self._codec)
        async with self._thread_lock:
            return await asyncio.to_thread(encode, self._thread_codec)


def _num_chars(prompt: Prompt | None) -> int:
    """Return the number of characters to encode. Token ids have none."""
    return len(prompt) if isinstance(prompt, str) else 0
