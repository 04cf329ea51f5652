"""Encode text, conversations and audio for a model, and decode its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammar, Grammars
from outrider.core.params import InvalidParam
from outrider.core.prompts import chat_tokens, text_tokens
from outrider.core.source import SourceRules
from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.source import audio_features
from outrider.models.torch.speech.wav import Recording

Prompt = str | Sequence[int]
# Text or token ids. For a speech model: the path of a WAV file, the samples of a recording, or its features.
Source = Prompt | Path | Sequence[float] | npt.NDArray[Any] | torch.Tensor | Recording | AudioFeatures
EncodedSource = tuple[int, ...] | AudioFeatures


class EncodedPrompt(NamedTuple):
    """A prompt and its source, encoded by a `TextCodec`. The source fits the target."""

    tokens: tuple[int, ...]
    source: EncodedSource | None = None  # what the encoder of an encoder-decoder target reads; None: there is none

    @property
    def source_token_ids(self) -> tuple[int, ...]:
        """The tokens of the source; () if there is none, or if it is audio."""
        return self.source if isinstance(self.source, tuple) else ()


class TextCodec:
    """Encodes and decodes for one model, with its tokenizer, chat template, grammars and rules for a source.

    A tokenizer of transformers is not thread-safe, so each thread has a codec of its own (`copy`).
    """

    def __init__(
        self, tokenizer: Any, *, vocab: int, end_ids: frozenset[int], source_rules: SourceRules | None = None
    ) -> None:
        """Use a tokenizer of transformers for a model with logits for `vocab` ids, of which `end_ids` end a text.

        `source_rules` are those of an encoder-decoder target; None: the target is a decoder-only model.
        """
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.end_ids = end_ids
        self.source_rules = source_rules
        self._grammars = Grammars(tokenizer, vocab=vocab, end_ids=sorted(end_ids))

    def copy(self) -> TextCodec:
        """Return a codec of the same model with a tokenizer of its own, for another thread."""
        return TextCodec(
            deepcopy(self.tokenizer), vocab=self.vocab, end_ids=self.end_ids, source_rules=self.source_rules
        )

    @property
    def speech_rules(self) -> SpeechRules | None:
        """The rules of speech of the checkpoint; None: the target is not a speech model."""
        return None if self.source_rules is None else self.source_rules.speech

    @property
    def chat_template(self) -> str:
        """The chat template of the model; "" if it has none."""
        return str(getattr(self.tokenizer, "chat_template", None) or "")

    @property
    def input_kind(self) -> str:
        """The kind of input: "chat" with a chat template, "prompt" without; for an encoder "source" or "audio"."""
        if self.source_rules is not None:
            return "source" if self.speech_rules is None else "audio"
        return "chat" if self.chat_template else "prompt"

    def encode(self, prompt: Prompt, *, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds.

        For encoder-decoder targets, the prompt is the beginning of the output. A text has the model's start tokens
        before it and no other special tokens. `language` and `task` are those of `start_tokens`, for a text only.

        Raises:
            OutriderError: the prompt is neither a string nor a list of token ids, or token ids come
                with a language or a task.
        """
        self._check_speech(language, task)
        if not isinstance(prompt, str) and (name := _first_given(language=language, task=task)):
            raise OutriderError(f"{name} is for a prompt of text; put its token among the ids, or leave {name} out")
        if isinstance(prompt, str) and self.source_rules is not None:
            start = self.start_tokens(language, task)
            return start + text_tokens(self.tokenizer, prompt, special=False)
        return self._encode(prompt, "a prompt")

    def encode_source(self, source: Source) -> EncodedSource:
        """Return the tokens of a source, with the special tokens that the tokenizer adds, or the features of audio.

        A speech model takes the path of a WAV file, a `Recording`, or samples [n] or [n, channels]
        in [-1, 1] at its rate, which is 16000 for Whisper.

        Raises:
            OutriderError: the source is neither a string nor a list of token ids, or the model does not take its audio.
        """
        rules = self.speech_rules
        return self._encode(source, "a source") if rules is None else audio_features(source, rules)

    def encode_with_source(
        self, prompt: Prompt | None, source: Source | None, *, language: str | None = None, task: str | None = None
    ) -> EncodedPrompt:
        """Return the tokens of a prompt and what the encoder of an encoder-decoder target reads.

        Without a prompt, the output of such a target begins with its start tokens, those of `language` and `task`.

        Raises:
            OutriderError: the prompt or the source does not fit the model.
        """
        encoded_source = None if source is None else self.encode_source(source)
        # Check the source first: without one, most prompts of an encoder-decoder model are a mistake, too.
        self.check_source(encoded_source)
        if prompt is None:
            return EncodedPrompt(self.start_tokens(language, task), encoded_source)
        return EncodedPrompt(self.encode(prompt, language=language, task=task), encoded_source)

    def start_tokens(self, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the default prompt of an encoder-decoder target: the tokens that its output begins with.

        `language` and `task` are for speech models; see `SpeechRules.start_tokens`.

        Raises:
            OutriderError: the target is a decoder-only model, or its checkpoint does not name these tokens; or the
                speech model does not know the language or the task, or needs a language.
        """
        self._check_speech(language, task)
        rules = self.source_rules
        if rules is None:
            raise OutriderError("this target is a decoder-only model and has no default prompt; give a prompt")
        if rules.speech is not None:
            start: tuple[int, ...] = rules.speech.start_tokens(language, task)
            return start
        if not rules.start:
            raise OutriderError(
                "the target's checkpoint has no decoder_start_token_id; set it in its config.json,"
                " or give a prompt of token ids"
            )
        return rules.start

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Apply the chat template to a conversation and return the tokens, up to the assistant's turn.

        Args:
            messages: the conversation.
            tools: descriptions of functions, for templates that support them.
            add_generation_prompt: whether the assistant's turn begins after the last message.
            continue_final_message: end within the last message, which the completion continues.
            options: further variables of the template, such as enable_thinking.

        Raises:
            OutriderError: the model has no chat template, or the template refuses or drops a message.
        """
        if self.source_rules is not None:
            raise OutriderError(
                "this target is an encoder-decoder model, which takes a source and no conversation;"
                " give the text as a source"
            )
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise OutriderError("this model has no chat template; give the prompt as plain text")
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise OutriderError(
                'a conversation is a list of messages; give for example [{"role": "user", "content": "..."}]'
            )
        return chat_tokens(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            options=options,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens.

        Raises:
            OutriderError: an item is not a token id of the vocabulary.
        """
        if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Iterable):
            raise OutriderError(f"{tokens!r} is not a list of token ids; give whole numbers")
        ids = _whole_ids("the list to decode", tokens)
        if message := self.outside(ids):
            raise OutriderError(message)
        return self.text(ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Do what `decode` does for tokens that the engine has generated, without checks."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prepare(self, constraint: Constraint) -> Grammar:
        """Compile a constraint and cache it. Large ones take seconds.

        Raises:
            OutriderError: it is invalid or too large.
        """
        if not isinstance(constraint, Constraint):
            raise OutriderError(f"constraint is {constraint!r}; use one of Constraint's, such as Constraint.regex(...)")
        return self._grammars.compile(constraint)

    def check_source(self, source: EncodedSource | None) -> None:
        """Raise InvalidParam if a source does not fit the target."""
        rules = self.source_rules
        if rules is None:
            if source is not None:
                raise InvalidParam(
                    "source", "source is for encoder-decoder models; remove it, because this target is not one"
                )
        elif source is None:
            raise InvalidParam("source", "source is missing, which this encoder-decoder target reads; give a source")
        elif isinstance(source, AudioFeatures) or rules.speech is not None:
            if not isinstance(source, AudioFeatures):
                raise InvalidParam("source", "source is text, and this target is a speech model; give audio")
            if rules.speech is None:
                raise InvalidParam("source", "source is audio, and this target reads text; give text or token ids")
        elif not source:
            raise InvalidParam("source", "source is empty; give at least one token")
        elif len(source) > rules.context:
            raise InvalidParam(
                "source",
                f"source is {len(source)} tokens long, and the encoder takes {rules.context}; shorten the source",
            )
        elif message := self.outside(source):
            raise InvalidParam("source", message)

    def outside(self, ids: Iterable[int]) -> str | None:
        """Return an error message if an id is not in the vocabulary."""
        first = next((token for token in ids if not 0 <= token < self.vocab), None)
        if first is None:
            return None
        return f"token id {first} is not in the vocabulary of {self.vocab}; use ids from 0 to {self.vocab - 1}"

    def _check_speech(self, language: str | None, task: str | None) -> None:
        if self.speech_rules is None and (name := _first_given(language=language, task=task)):
            raise OutriderError(f"{name} is for speech models, and this target is not one; leave it out")

    def _encode(self, text: object, what: str) -> tuple[int, ...]:
        if isinstance(text, str):
            return text_tokens(self.tokenizer, text)
        if not isinstance(text, Sequence) or isinstance(text, bytes | bytearray | memoryview):
            raise OutriderError(
                f"{what} has the type {type(text).__name__}; give a string, or a list of token ids"
                " (of an array its tolist())"
            )
        return _whole_ids(what, text)


def _first_given(**arguments: str | None) -> str | None:
    return next((name for name, value in arguments.items() if value is not None), None)


def _whole_ids(what: str, tokens: Iterable[Any]) -> tuple[int, ...]:
    ids = []
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise OutriderError(f"{what} holds {token!r} among its token ids; give whole numbers")
        ids.append(int(token))
    return tuple(ids)
