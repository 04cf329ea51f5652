"""Samples to spectra, and spectra to latents and back."""

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.audio.config import AudioConfig

_LOUDEST = 8.0  # the greatest log(1 + magnitude) that a latent can mean; keeps wild latents from overflowing


def log_spectra(frames: Tensor) -> Tensor:
    """Return log(1 + magnitude) of the bins 1, 2, ..., n of frames (..., 2n samples), with a Hann window."""
    window = torch.hann_window(frames.shape[-1])
    return torch.log1p(torch.fft.rfft(frames * window).abs()[..., 1:])


def encode(samples: Tensor, audio: AudioConfig) -> Tensor:
    """Return the latents (frames, channels, 1, 1) of a recording, one for each `hop` samples.

    Frame t is centered at sample t x hop, so `StreamingSynthesizer` answers with the samples one hop later.
    """
    padded = functional.pad(samples, (audio.hop, 0))
    spectra = log_spectra(padded.unfold(0, 2 * audio.hop, audio.hop))
    return ((spectra - audio.mean) / audio.deviation)[..., None, None]


def magnitudes(latents: Tensor, audio: AudioConfig) -> Tensor:
    """Return the magnitudes (frames, channels) of latents (frames, channels, 1, 1)."""
    logs = latents[..., 0, 0] * audio.deviation + audio.mean
    return torch.expm1(logs.clamp(0.0, _LOUDEST))
