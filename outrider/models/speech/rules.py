"""What a speech model reads, and the tokens that its transcripts begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError
from outrider.models.speech.wav import Recording

_TRANSCRIBE = "transcribe"
_SHOWN = 5  # languages that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """What the encoder of a speech model takes, and what its checkpoint says about transcripts."""

    extractor: Any  # the feature extractor of the checkpoint, of transformers
    bins: int  # of a frame
    frames: int  # that the encoder takes; the features of a recording are padded to them
    start: int | None  # the first token of a transcript
    forced: tuple[int | None, ...]  # tokens after it that an older checkpoint names; None: the language is detected
    languages: Mapping[str, int]  # the tokens of languages, by their code, such as "en"; empty: English only
    tasks: Mapping[str, int]  # the tokens of tasks
    no_timestamps: int | None  # the token that switches timestamps off
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
        """Length of the longest recording."""
        return int(self.extractor.chunk_length)

    def features(self, recording: Recording) -> AudioFeatures:
        """Return the features of a recording, which is padded with silence.

        Raises:
            OutriderError: it has another rate, is empty or too long, or holds values that are no numbers.
        """
        samples = recording.samples
        if recording.rate != self.rate:
            raise OutriderError(
                f"the audio has {recording.rate} samples per second, and the model takes {self.rate}; convert it, for"
                f" example with: ffmpeg -i FILE -ac 1 -ar {self.rate} OUT.wav"
            )
        if samples.ndim != 1 or not samples.size:
            raise OutriderError(
                f"the audio is an array of shape {samples.shape}; give the samples of one channel, at least one"
            )
        if not np.isfinite(samples).all():
            raise OutriderError("the audio holds NaN or infinite samples; give finite ones")
        length = samples.size / recording.rate
        if length > self.seconds:
            raise OutriderError(
                f"the audio is {length:.1f} s long, and the encoder takes {self.seconds} s; split it into shorter parts"
            )
        extracted = self.extractor(samples, sampling_rate=recording.rate, return_tensors="np")
        return AudioFeatures(torch.from_numpy(np.asarray(extracted["input_features"][0], dtype=np.float32)))

    def silence(self) -> AudioFeatures:
        """Return features without a recording, for measurements."""
        return AudioFeatures(torch.zeros(self.bins, self.frames))

    def start_tokens(self, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the tokens before a transcript without timestamps, as `transformers.generate` builds them.

        Args:
            language: a code or an English name, such as "de" or "german". None: the default of the checkpoint.
            task: transcribe, or translate for English text. None: the default of the checkpoint, or transcribe.

        Raises:
            OutriderError: the model does not know the language or the task, or needs a language.
        """
        if self.start is None:
            raise OutriderError(
                "the target's checkpoint has no decoder_start_token_id; set it in its generation_config.json, or give a"
                " prompt of token ids"
            )
        language = language or self.language
        tokens = [self.start]
        if language is None and task is None and self.task is None and None not in self.forced:
            tokens += [token for token in self.forced if token is not None]
        if self.languages and len(tokens) == 1:
            tokens += self._multilingual(language, task or self.task or _TRANSCRIBE)
        elif not self.languages:
            self._check_english(language, task)
        if self.no_timestamps is not None and tokens[-1] != self.no_timestamps:
            tokens.append(self.no_timestamps)
        return tuple(tokens)

    def _multilingual(self, language: str | None, task: str) -> list[int]:
        """Return the tokens of a language and a task."""
        known = sorted(self.languages)
        some = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        if language is None:
            raise OutriderError(f"this model transcribes several languages; give the language of the audio: {some}")
        code = language_code(language)
        if code not in self.languages:
            raise OutriderError(f"language {language!r} is unknown to this model; use a code such as {some}")
        if self.tasks and task not in self.tasks:
            raise OutriderError(f"task {task!r} is unknown to this model; use {' or '.join(sorted(self.tasks))}")
        return [self.languages[code], *([self.tasks[task]] if self.tasks else ())]

    def _check_english(self, language: str | None, task: str | None) -> None:
        if language is not None and language_code(language) != "en":
            raise OutriderError(f"language is {language!r}, and this model transcribes English only; leave it out")
        if task not in (None, _TRANSCRIBE):
            raise OutriderError(f"task is {task!r}, and this model transcribes English only; leave it out")


def language_code(language: str) -> str:
    """Return the code of a language: "de" for "de", "German" or "<|de|>"."""
    name = language.lower().removeprefix("<|").removesuffix("|>")
    return str(TO_LANGUAGE_CODE.get(name, name))
