"""Turn what a user gives as the source of a speech model into features."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from pathlib import Path

import numpy as np
import torch

from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError
from outrider.models.speech.rules import SpeechRules
from outrider.models.speech.wav import Recording, read_wav_file

_FIX = "give a WAV file, or the samples of one channel as an array of floats"


def audio_features(source: object, rules: SpeechRules) -> AudioFeatures:
    """Return the features of a source.

    Args:
        source: the path of a WAV file, a `Recording`, samples [n] in [-1, 1] at the rate of the model as a numpy array,
            a tensor or a list, or features.
        rules: what the model takes.

    Raises:
        OutriderError: it is none of these, or does not fit the model.
    """
    if isinstance(source, AudioFeatures):
        if source.values.shape != (rules.bins, rules.frames):
            raise OutriderError(
                f"the audio features have shape {tuple(source.values.shape)}, and the model takes"
                f" {(rules.bins, rules.frames)}; {_FIX}"
            )
        return source
    if isinstance(source, str | Path):
        return rules.features(read_wav_file(source))
    if isinstance(source, Recording):
        return rules.features(source)
    return rules.features(Recording(samples=_samples(source), rate=rules.rate))


def _samples(source: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return samples as an array. Integers are refused, because their scale is unknown."""
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().float().numpy() if source.is_floating_point() else source.cpu().numpy()
    if isinstance(source, Sequence) and not isinstance(source, bytes | bytearray | memoryview):
        if not all(isinstance(sample, Real) for sample in source):
            raise OutriderError(f"the audio is a list with items that are no numbers; {_FIX}")
        source = np.asarray(source, dtype=np.float32)
    if not isinstance(source, np.ndarray):
        raise OutriderError(f"the audio is a {type(source).__name__}; {_FIX}")
    if not np.issubdtype(source.dtype, np.floating):
        raise OutriderError(f"the audio has samples of type {source.dtype}; give floats in [-1, 1]")
    return source.astype(np.float32)
