"""Makes the training sounds: notes and chirps, as a caption says."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from outrider.media.models.audio.captions import LANGUAGE
from outrider.media.models.audio.config import AudioConfig

_DO = 261.63  # Hz, of the low notes
_NOTES = {"do": 0, "re": 2, "mi": 4, "fa": 5, "sol": 7, "la": 9, "ti": 11}  # semitones above do
_HARMONICS = {"pure": (1,), "hollow": (1, 3, 5), "bright": (1, 2, 3, 4)}
_STEPS = {  # semitones above the caption's note, from note to note
    "pulse": (0,),
    "trill": (0, 4),
    "arpeggio": (0, 4, 7, 12),
    "scale": (0, 2, 4, 5, 7, 9, 11, 12),
}
_NOTE_SECONDS = {"slow": 0.256, "fast": 0.128}
_CHIRP_SECONDS = {"slow": 1.024, "fast": 0.512}  # in which a chirp moves by an octave
_ATTACK = 0.005  # seconds
_DECAY = 0.5  # seconds in which a note falls to 1/e
_HIGHEST = 0.95  # of a harmonic, as a share of half of the sample rate
_LOUDNESS = (0.45, 0.55)
_DETUNED = 0.1  # semitones, at most


def make_sound(words: tuple[str, ...], samples: int, audio: AudioConfig, rng: random.Random) -> Tensor:
    """Return a sound, (samples,), from -1 to 1. Loudness and pitch vary a little.

    Args:
        words: the words of a caption that carry meaning.
        samples: how many.
        audio: gives the sample rate.
        rng: of the variation.
    """
    timbre, pattern, height, note, tempo = words
    times = torch.arange(samples, dtype=torch.float64) / audio.sample_rate
    semitones, since = _pattern(pattern, tempo, times)
    root = _NOTES[note] + 12 * (height == "high") + rng.uniform(-_DETUNED, _DETUNED)
    frequencies = _DO * 2 ** ((root + semitones) / 12)
    phases = (2 * math.pi / audio.sample_rate) * frequencies.cumsum(0)
    envelope = (since / _ATTACK).clamp(max=1.0) * (-since / _DECAY).exp()
    harmonics = _HARMONICS[timbre]
    sound = torch.zeros(samples, dtype=torch.float64)
    for harmonic in harmonics:
        audible = (harmonic * frequencies < _HIGHEST * audio.sample_rate / 2).double()
        sound += audible * (harmonic * phases).sin() / harmonic
    total = sum(1 / harmonic for harmonic in harmonics)
    return (rng.uniform(*_LOUDNESS) / total**0.5 * envelope * sound).float()


def random_sounds(count: int, audio: AudioConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Return random sounds of whole outputs, (count, samples), and the ids of their captions, (count, words)."""
    rng = random.Random(seed)
    samples = audio.blocks * audio.block_samples
    captions = [LANGUAGE.random_words(rng) for _ in range(count)]
    sounds = torch.stack([make_sound(words, samples, audio, rng) for words in captions])
    return sounds, torch.tensor([LANGUAGE.ids(words) for words in captions])


def _pattern(pattern: str, tempo: str, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return semitones above the caption's note, and the seconds since the note or chirp began, for each time."""
    if pattern in _STEPS:
        length = _NOTE_SECONDS[tempo]
        steps = torch.tensor(_STEPS[pattern], dtype=torch.float64)
        return steps[(times / length).long() % len(steps)], times % length
    length = _CHIRP_SECONDS[tempo]
    share = times % length / length
    return 12 * (share if pattern == "rise" else 1 - share), times % length
