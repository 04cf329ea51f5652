"""Writes samples as a WAV file."""

import wave
from pathlib import Path

from torch import Tensor

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import check_writable

_GREATEST = 32767  # of a sample of 16 bits


def check_sound_file(path: str | Path) -> Path:
    """Return the path of a sound that can be written.

    Raises:
        OutriderError: the suffix is not .wav, or the folder cannot be written.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() != ".wav":
        raise OutriderError(f"{path} is not the name of a sound file; end it with .wav")
    check_writable(file)
    return file


def write_wav(samples: Tensor, file: Path, *, sample_rate: int) -> None:
    """Write mono samples of 16 bits.

    Args:
        samples: (n,), from -1 to 1. Values beyond that are cut off.
        file: ends in .wav.
        sample_rate: samples per second.
    """
    values = (samples.clamp(-1.0, 1.0) * _GREATEST).round().short().numpy()
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes(values.astype("<i2").tobytes())
