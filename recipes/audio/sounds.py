"""Makes the training sounds: notes and chirps, as a caption says."""

import math
import random

import torch
from torch import Tensor

from outrider.media.models.audio.config import LANGUAGE, AudioConfig

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
    timbre, pattern, _, _, tempo = words
    times = torch.arange(samples, dtype=torch.float64) / audio.sample_rate
    since = times % _length(pattern, tempo)
    pitches = semitones(words, times) + rng.uniform(-_DETUNED, _DETUNED)
    phases = (2 * math.pi / audio.sample_rate) * _frequencies(pitches).cumsum(0)
    envelope = (since / _ATTACK).clamp(max=1.0) * (-since / _DECAY).exp()
    sound = torch.zeros(samples, dtype=torch.float64)
    for harmonic, audible in audible_harmonics(timbre, pitches, audio).items():
        sound += audible.double() * (harmonic * phases).sin() / harmonic
    total = sum(1 / harmonic for harmonic in _HARMONICS[timbre])
    return (rng.uniform(*_LOUDNESS) / total**0.5 * envelope * sound).float()


def random_sounds(count: int, audio: AudioConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Return random sounds of whole outputs, (count, samples), and the ids of their captions, (count, words)."""
    rng = random.Random(seed)
    samples = audio.blocks * audio.block_samples
    captions = [LANGUAGE.random_words(rng) for _ in range(count)]
    sounds = torch.stack([make_sound(words, samples, audio, rng) for words in captions])
    return sounds, torch.tensor([LANGUAGE.ids(words) for words in captions])


def semitones(words: tuple[str, ...], times: Tensor) -> Tensor:
    """Return the pitch of a caption's sound at times in seconds, in semitones above the low do."""
    _, pattern, height, note, tempo = words
    root = _NOTES[note] + 12 * (height == "high")
    length = _length(pattern, tempo)
    if pattern in _STEPS:
        steps = torch.tensor(_STEPS[pattern], dtype=torch.float64)
        return root + steps[(times / length).long() % len(steps)]
    share = times % length / length
    return root + 12 * (share if pattern == "rise" else 1 - share)


def audible_harmonics(timbre: str, pitches: Tensor, audio: AudioConfig) -> dict[int, Tensor]:
    """Return for each harmonic of a timbre whether it can be heard at pitches in semitones above the low do."""
    limit = _HIGHEST * audio.sample_rate / 2
    frequencies = _frequencies(pitches)
    return {harmonic: harmonic * frequencies < limit for harmonic in _HARMONICS[timbre]}


def _length(pattern: str, tempo: str) -> float:
    """Return the seconds of a note or chirp."""
    return _NOTE_SECONDS[tempo] if pattern in _STEPS else _CHIRP_SECONDS[tempo]


def _frequencies(pitches: Tensor) -> Tensor:
    """Return the frequencies in Hz of semitones above the low do."""
    return _DO * 2 ** (pitches / 12)
