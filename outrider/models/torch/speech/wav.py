"""Read recordings from WAV files."""

import io
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.errors import OutriderError

_FIX = "convert it, for example with: ffmpeg -i FILE -c:a pcm_s16le OUT.wav"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """A recording."""

    samples: npt.NDArray[np.float32]  # [n] or [n, channels], in [-1, 1]
    rate: int  # samples per second


def read_wav_file(path: str | Path) -> Recording:
    """Read a WAV file, as `read_wav` does. Raises OutriderError if it cannot be read."""
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutriderError(f"{str(path)!r} cannot be read ({reason}); give a WAV file") from error
    return read_wav(data, str(path))


def read_wav(data: bytes, name: str) -> Recording:
    """Decode a WAV file of integer PCM. Several channels become their mean.

    Args:
        data: the content of the file.
        name: of the file, for messages.

    Raises:
        OutriderError: it is not such a file, or has no samples.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels = file.getnchannels()
            width = file.getsampwidth()
            rate = file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise OutriderError(f"{name} is no WAV file of PCM samples ({reason}); {_FIX}") from error
    if width not in (1, 2, 3, 4):
        raise OutriderError(f"{name} has samples of {width} bytes, and 1 to 4 can be read; {_FIX}")
    whole = len(frames) // (width * channels) * (width * channels)
    if not whole:
        raise OutriderError(f"{name} holds no samples; give a recording that is not empty")
    samples = _decode(frames[:whole], width).reshape(-1, channels).mean(axis=1)
    return Recording(samples=samples.astype(np.float32), rate=rate)


def _decode(frames: bytes, width: int) -> npt.NDArray[np.float64]:
    """Return the samples in [-1, 1] of little-endian integers of `width` bytes. Those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(frames, dtype=np.uint8).astype(np.float64) - 128.0) / 128.0
    padded = np.zeros((len(frames) // width, 4), dtype=np.uint8)
    padded[:, 4 - width :] = np.frombuffer(frames, dtype=np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0].astype(np.float64) / 2.0**31
