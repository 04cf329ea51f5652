"""Turn recordings of several channels and other rates into what a speech model takes."""

import numpy as np
import numpy.typing as npt

from outrider.errors import OutriderError
from outrider.models.torch.speech.wav import Recording

_Samples = npt.NDArray[np.float32]
_MAX_CHANNELS = 32  # more are taken for an array whose axes are swapped


def at_rate(recording: Recording, rate: int) -> Recording:
    """Return the mean of the channels of a recording, with `rate` samples per second.

    Raises:
        OutriderError: it is empty, has too many channels or values that are no numbers, or the
            package that resamples is missing.
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
