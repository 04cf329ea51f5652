"""Spectra to samples, block after block: phases follow the peaks of the spectrum, and frames overlap and add.

This is single pass spectrogram inversion (Beauregard, Harish and Wyse 2015). The phase of a peak
grows with its frequency, which is read from the peak's form. All bins around a peak have its phase.
Nothing is iterated, so a block costs little, and the state is one frame long.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.spectrum import magnitudes

_SMALL = 1e-6


@dataclass(frozen=True, slots=True)
class _State:
    """The values of the last frame that the next block needs. The arrays are not written to again."""

    phases: np.ndarray  # of each bin, in radians
    frequencies: np.ndarray  # of the peak that each bin belongs to, in radians per sample
    tail: np.ndarray  # the second half of the frame, which the next frame adds to


class StreamingSynthesizer:
    """Decodes spectra to samples block by block. Its state can be kept and put back.

    Args:
        audio: sizes.
    """

    def __init__(self, audio: AudioConfig) -> None:
        self._audio = audio
        self._state: _State
        self.reset()

    def reset(self) -> None:
        """Start a new recording."""
        zeros = np.zeros(self._audio.channels, dtype=np.float32)
        self._state = _State(zeros, zeros, np.zeros(self._audio.hop, dtype=np.float32))

    def decode(self, latent: Tensor) -> Tensor:
        """Return the next samples, (frames x hop,), from -1 to 1."""
        hop = self._audio.hop
        spectra = magnitudes(latent, self._audio).numpy()
        frequencies, peaks = follow_peaks(spectra)
        phases = np.empty_like(spectra)
        phase, before = self._state.phases, self._state.frequencies
        for t in range(len(spectra)):
            own = peaks[t]
            # A peak goes on from the phase at its place, at the mean of the old and the new frequency.
            phase = (phase[own] + 0.5 * hop * (before[own] + frequencies[t])) % (2 * math.pi)
            phases[t] = phase
            before = frequencies[t]
        bins = np.zeros((len(spectra), hop + 1), dtype=np.complex64)
        bins[:, 1:] = spectra * np.exp(1j * phases)
        # Phases are those at the center of a frame, which the inverse transform puts at the first sample.
        frames = np.roll(np.fft.irfft(bins, n=2 * hop).astype(np.float32), hop, axis=-1)
        tails = np.concatenate([self._state.tail[None], frames[:, hop:]])
        self._state = _State(phase, before, tails[-1])
        return torch.from_numpy((frames[:, :hop] + tails[:-1]).reshape(-1)).clamp(-1.0, 1.0)

    def snapshot(self) -> _State:
        """Return the state. Later calls do not change it."""
        return self._state

    def restore(self, state: _State) -> None:
        """Put a state back."""
        self._state = state


def follow_peaks(spectra: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each bin the frequency of the nearest peak, in radians per sample, and the number of the peak's bin.

    Args:
        spectra: magnitudes of the bins 1, 2, ..., n, (frames, n).
    """
    count = spectra.shape[-1]
    logs = np.log(spectra + _SMALL)
    padded = np.pad(logs, ((0, 0), (1, 1)), constant_values=math.log(_SMALL))
    left, right = padded[:, :-2], padded[:, 2:]
    is_peak = (logs > left) & (logs >= right)
    # The top of the parabola through a peak and its neighbors.
    curve = np.where(is_peak, left - 2 * logs + right, -1.0)
    offsets = np.where(is_peak, 0.5 * (left - right) / np.minimum(curve, -_SMALL), 0.0)
    numbers = np.arange(count)
    below = np.maximum.accumulate(np.where(is_peak, numbers, -count), axis=-1)
    above = np.minimum.accumulate(np.where(is_peak, numbers, 2 * count)[:, ::-1], axis=-1)[:, ::-1]
    peaks = np.where(numbers - below <= above - numbers, below, above)
    peaks = np.where((peaks < 0) | (peaks >= count), numbers, peaks)  # a flat spectrum has no peaks
    frequencies = (peaks + 1 + np.take_along_axis(offsets, peaks, axis=-1)) * (math.pi / count)
    return frequencies.astype(np.float32), peaks
