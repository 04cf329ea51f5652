"""The source of an encoder-decoder model."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRules:
    """The rules for an encoder-decoder model's source and for the beginning of its output."""

    context: int  # most tokens of a source, or positions of speech
    start: tuple[int, ...]  # the default prompt of the decoder; (): the checkpoint names none
    speech: Any = None  # its SpeechRules; None: the source is text
