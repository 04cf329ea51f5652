"""The input of a speech model, and the first tokens of its transcripts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.core.params import InvalidParam
from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError, either
from outrider.models.torch.speech.timestamps import TimestampRules

TRANSCRIBE = "transcribe"
ENGLISH = "en"
_SHOWN = 5  # languages that a message names as examples


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """The input of a speech model's encoder, and its checkpoint's rules for transcripts."""

    extractor: Any  # the feature extractor of the checkpoint, of transformers
    bins: int  # of a frame
    frames: int  # that the encoder takes; the features of a recording are padded to them
    positions: int  # of the decoder
    start: int | None  # the first token of a transcript
    forced: tuple[int | None, ...]  # tokens after it that an older checkpoint names; None: the language is detected
    languages: Mapping[str, int]  # the tokens of languages, by their code, such as "en"; empty: English only
    tasks: Mapping[str, int]  # the tokens of tasks
    no_timestamps: int | None  # the token that switches timestamps off
    timestamps: TimestampRules | None  # None: the checkpoint does not say which tokens are timestamps
    previous: int | None  # the token before previous text
    language: str | None  # the default of the checkpoint
    task: str | None  # the default of the checkpoint
    suppressed: tuple[int, ...]  # tokens that are never emitted
    suppressed_first: tuple[int, ...]  # tokens that are not emitted first

    @property
    def rate(self) -> int:
        """Samples per second."""
        return int(self.extractor.sampling_rate)

    @property
    def seconds(self) -> int:
        """Seconds of audio that the encoder takes."""
        return int(self.extractor.chunk_length)

    @property
    def frames_per_second(self) -> float:
        return self.rate / int(self.extractor.hop_length)

    def silence(self) -> AudioFeatures:
        """Return features without a recording, for measurements."""
        return AudioFeatures(torch.zeros(self.bins, self.frames))

    def needs_detection(self, language: str | None, task: str | None) -> bool:
        """Return whether the model must detect the language: neither the caller nor the checkpoint names one."""
        if not self.languages or language is not None or self.language is not None:
            return False
        return not self._uses_forced(language, task)

    def default_task(self, task: str | None, language: str | None = None) -> str:
        """Return a task, or else the default of the checkpoint."""
        if task is None and self.task is None and language is None and self.language is None:
            forced = (name for name, token in self.tasks.items() if token in self.forced)
            return next(forced, TRANSCRIBE)
        return task or self.task or TRANSCRIBE

    def language_of(self, tokens: tuple[int, ...]) -> str | None:
        """Return the code of the language that tokens name. None: they name none."""
        if not self.languages:
            return ENGLISH
        return next((code for code, token in self.languages.items() if token in tokens), None)

    def check_timestamps(self) -> TimestampRules:
        """Return the rules of timestamps.

        Raises:
            OutriderError: the checkpoint does not say which tokens are timestamps.
        """
        if self.timestamps is None:
            raise OutriderError(
                "the target's checkpoint has no no_timestamps_token_id, so its timestamps are"
                " unknown, which long audio needs, too; set it in its generation_config.json"
            )
        return self.timestamps

    def start_tokens(
        self, language: str | None = None, task: str | None = None, *, timestamps: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens before a transcript, as `transformers.generate` builds them.

        Args:
            language: a code or an English name, such as "de" or "german". None: the default of the checkpoint.
            task: transcribe, or translate for English text. None: the default of the checkpoint, or transcribe.
            timestamps: whether the transcript has timestamps.

        Raises:
            OutriderError: the model does not know the language or the task, or needs a language.
        """
        if self.start is None:
            raise OutriderError(
                "the target's checkpoint has no decoder_start_token_id; set it in its"
                " generation_config.json, or give a prompt of token ids"
            )
        tokens = [self.start]
        if self._uses_forced(language or self.language, task):
            tokens += [token for token in self.forced if token is not None]
        if self.languages and len(tokens) == 1:
            tokens += self._multilingual(language or self.language, self.default_task(task, language))
        elif not self.languages:
            self._check_english(language or self.language, task)
        if self.no_timestamps is not None:
            if tokens[-1] == self.no_timestamps:
                tokens.pop()
            if not timestamps:
                tokens.append(self.no_timestamps)
        return tuple(tokens)

    def _uses_forced(self, language: str | None, task: str | None) -> bool:
        """Return whether the forced tokens of the checkpoint begin a transcript."""
        return language is None and task is None and self.task is None and None not in self.forced and bool(self.forced)

    def _multilingual(self, language: str | None, task: str) -> list[int]:
        known = sorted(self.languages)
        if language is None:
            some = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
            raise InvalidParam(
                "language",
                "this model transcribes several languages; give the language of the audio:"
                f" {some}; outrider.transcribe detects it",
            )
        code = language_code(language)
        if code not in self.languages:
            raise InvalidParam("language", f"language {language!r} is unknown to this model; use {either(known)}")
        if task not in (self.tasks or (TRANSCRIBE,)):
            names = " or ".join(sorted(self.tasks)) or TRANSCRIBE
            raise InvalidParam("task", f"task {task!r} is unknown to this model; use {names}")
        return [self.languages[code], *([self.tasks[task]] if self.tasks else ())]

    def _check_english(self, language: str | None, task: str | None) -> None:
        if language is not None and language_code(language) != ENGLISH:
            raise InvalidParam(
                "language", f"language is {language!r}, and this model transcribes English only; leave it out"
            )
        if task not in (None, TRANSCRIBE):
            raise InvalidParam("task", f"task is {task!r}, and this model transcribes English only; leave it out")


def language_code(language: str) -> str:
    """Return the code of a language: "de" for "de", "German" or "<|de|>"."""
    name = language.lower().removeprefix("<|").removesuffix("|>")
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return str(TO_LANGUAGE_CODE.get(name, name))


def language_name(code: str) -> str:
    """Return the English name of a language in small letters: "german" for "de". An unknown code is its own name."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return str(LANGUAGES.get(code, code))
