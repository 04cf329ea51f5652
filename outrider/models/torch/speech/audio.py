"""The input of a transcript: the features of a recording of any length, and its length."""

from dataclasses import dataclass

import torch

from outrider.core.types import AudioFeatures
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.source import audio_features, recording_of, spectrum, too_long


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audio:
    """The features of a recording."""

    features: torch.Tensor  # [bins, F] float32; F frames, without padding if `timestamps`
    seconds: float  # of the recording
    timestamps: bool  # whether its transcript needs timestamps


def hear(source: object, rules: SpeechRules, *, timestamps: bool) -> Audio:
    """Return the features of a source.

    A recording that fits into one pass of the encoder is padded with silence, unless timestamps are wanted. All others
    keep their length, and `Windows` cuts them.

    Args:
        source: a source, as in `audio_features`.
        rules: what the model takes.
        timestamps: whether the user asks for timestamps. A longer recording needs them in any case.

    Raises:
        OutriderError: the source does not fit the model, or the model has no timestamps and they are needed.
    """
    if isinstance(source, AudioFeatures):
        features = audio_features(source, rules).values
        seconds = features.shape[1] / rules.frames_per_second
    else:
        recording = recording_of(source, rules)
        seconds = recording.samples.size / rules.rate
        timestamps = timestamps or too_long(recording, rules)
        features = spectrum(recording, rules) if timestamps else audio_features(recording, rules).values
    if timestamps:
        rules.check_timestamps()
    return Audio(features=features, seconds=seconds, timestamps=timestamps)
