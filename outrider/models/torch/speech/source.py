"""Convert the source of a speech model to recordings and features."""

from collections.abc import Sequence
from numbers import Real
from pathlib import Path

import numpy as np
import torch

from outrider.core.types import AudioFeatures
from outrider.errors import OutriderError
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.wav import Recording, read_wav_file

_FIX = "give a WAV file, or samples as an array of floats"
_Samples = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def audio_features(source: object, rules: SpeechRules) -> AudioFeatures:
    """Return the features of a source that fits into one pass of the encoder, padded with silence.

    Args:
        source: the path of a WAV file, a `Recording`, samples [n] or [n, channels] in [-1, 1] at
            the rate of the model as a numpy array, a tensor or a list, or features.
        rules: what the model takes.

    Raises:
        OutriderError: it is none of these, or does not fit the model.
    """
    if isinstance(source, AudioFeatures):
        return _checked(source, rules)
    recording = recording_of(source, rules)
    if too_long(recording, rules):
        raise OutriderError(
            f"the audio is {recording.samples.size / rules.rate:.1f} s long, and the encoder takes"
            f" {rules.seconds} s; use outrider.transcribe, or split it into shorter parts"
        )
    extracted = rules.extractor(recording.samples, sampling_rate=rules.rate, return_tensors="np")
    return AudioFeatures(_tensor(extracted))


def recording_of(source: object, rules: SpeechRules) -> Recording:
    """Return a source other than features as a recording with one channel at the rate of the model.

    Raises:
        OutriderError: it is not a recording, or does not fit the model.
    """
    if isinstance(source, str | Path):
        source = read_wav_file(source)
    if not isinstance(source, Recording):
        source = Recording(samples=_samples(source), rate=rules.rate)
    return at_rate(source, rules.rate)


def too_long(recording: Recording, rules: SpeechRules) -> bool:
    """Return whether a recording at the model's rate is longer than a pass of the encoder."""
    return recording.samples.size > rules.seconds * rules.rate


def spectrum(recording: Recording, rules: SpeechRules) -> torch.Tensor:
    """Return the features [bins, F] of a recording at the model's rate, without padding."""
    extractor = rules.extractor
    samples = recording.samples
    if samples.size < extractor.n_fft:  # the least that has a frame
        samples = np.pad(samples, (0, extractor.n_fft - samples.size))
    return _tensor(
        extractor(samples, sampling_rate=rules.rate, truncation=False, padding="longest", return_tensors="np")
    )


def _checked(features: AudioFeatures, rules: SpeechRules) -> AudioFeatures:
    if features.values.shape != (rules.bins, rules.frames):
        raise OutriderError(
            f"the audio features have shape {tuple(features.values.shape)}, and the model takes"
            f" {(rules.bins, rules.frames)}; {_FIX}"
        )
    return features


def _tensor(extracted: object) -> torch.Tensor:
    """Return the features of the only recording in the output of an extractor."""
    return torch.from_numpy(np.asarray(extracted["input_features"][0], dtype=np.float32))  # type: ignore[index]


def _samples(source: object) -> _Samples:
    """Return samples as an array. Integers are refused, because their scale is unknown."""
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().float().numpy() if source.is_floating_point() else source.cpu().numpy()
    if isinstance(source, Sequence) and not isinstance(source, bytes | bytearray | memoryview):
        if not all(isinstance(sample, Real) for sample in source):
            raise OutriderError(f"the audio is a list with items that are not numbers; {_FIX}")
        source = np.asarray(source, dtype=np.float32)
    if not isinstance(source, np.ndarray):
        raise OutriderError(f"the audio is a {type(source).__name__}; {_FIX}")
    if not np.issubdtype(source.dtype, np.floating):
        raise OutriderError(f"the audio has samples of type {source.dtype}; give floats in [-1, 1]")
    return source.astype(np.float32)


_MAX_CHANNELS = 32  # with more, the axes of the array are probably swapped


def at_rate(recording: Recording, rate: int) -> Recording:
    """Return the mean of the channels of a recording, with `rate` samples per second.

    Raises:
        OutriderError: it is empty, has too many channels, NaN or infinite values, or the package that resamples is
            missing.
    """
    samples = recording.samples
    if samples.ndim not in (1, 2) or not samples.size:
        raise OutriderError(
            f"the audio is an array of shape {samples.shape}; give samples [n] or [n, channels], at least one"
        )
    if samples.ndim == 2 and samples.shape[1] > _MAX_CHANNELS:
        raise OutriderError(
            f"the audio is an array of shape {samples.shape}, which is [n, channels] with"
            f" {samples.shape[1]} channels; transpose it, or give at most {_MAX_CHANNELS}"
        )
    if not np.isfinite(samples).all():
        raise OutriderError("the audio holds NaN or infinite samples; give finite ones")
    if recording.rate < 1:
        raise OutriderError(f"the audio has {recording.rate} samples per second; give a rate of at least 1")
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float64).astype(np.float32)
    if recording.rate == rate:
        return Recording(samples=samples, rate=rate)
    return Recording(samples=_resample(samples, recording.rate, rate), rate=rate)


def _resample(samples: _Samples, old: int, new: int) -> _Samples:
    """Resample [n] with soxr at its default quality, which has no audible aliasing."""
    try:
        import soxr
    except ImportError as error:
        raise OutriderError(
            f"the audio has {old} samples per second and the model takes {new}; run pip install"
            f' "outrider[speech]", which resamples, or convert it: ffmpeg -i FILE -ac 1 -ar {new} OUT.wav'
        ) from error
    resampled: _Samples = np.asarray(soxr.resample(samples, old, new), dtype=np.float32)
    if not resampled.size:
        raise OutriderError(f"the audio has {samples.size} samples, too few to resample; give a longer recording")
    return resampled
