"""Which captions a window of a sound may belong to.

A window is shorter than a pattern. A chirp on do and one on re have most of their pitches in common, so a window of one
may be a window of the other. A scorer that is told otherwise can never be sure of either.
"""

from itertools import product

import torch
from torch import Tensor

from outrider.media.models.audio.config import LANGUAGE, AudioConfig
from recipes.audio.sounds import audible_harmonics, semitones

_MOTIONS = {"rise": 1, "fall": 2}  # all other patterns stand still: 0
_PARTIALS = 16  # sets of the first four harmonics


class CaptionFits:
    """Compares what sounds in a window with all that can sound in the sound of a caption.

    What sounds at one time has a number: the nearest semitone, whether the pitch moves, and the harmonics that can be
    heard.

    Args:
        audio: gives the times of frames.
    """

    def __init__(self, audio: AudioConfig) -> None:
        times = torch.arange(audio.blocks * audio.frames, dtype=torch.float64) * audio.hop / audio.sample_rate
        self._sounding = torch.stack([_sounding(words, times, audio) for words in product(*LANGUAGE.slots)])
        self._possible = torch.zeros(len(self._sounding), int(self._sounding.max()) + 1, dtype=torch.bool)
        self._possible.scatter_(1, self._sounding, value=True)

    def __call__(self, captions: Tensor, tokens: Tensor, first: int, frames: int) -> Tensor:
        """Return whether windows may belong to captions, (n,).

        Args:
            captions: (n, words).
            tokens: the captions that the sounds were made from, (n, words).
            first: first frame of the windows.
            frames: how many.
        """
        heard = self._sounding[_numbers(tokens), first : first + frames]
        return self._possible[_numbers(captions)].gather(1, heard).all(1)


def _sounding(words: tuple[str, ...], times: Tensor, audio: AudioConfig) -> Tensor:
    """Return the number of what sounds at each time."""
    timbre, pattern, *_ = words
    pitches = semitones(words, times)
    partials = torch.zeros(len(times), dtype=torch.int64)
    for harmonic, audible in audible_harmonics(timbre, pitches, audio).items():
        partials += audible.long() << (harmonic - 1)
    return (pitches.round().long() * 3 + _MOTIONS.get(pattern, 0)) * _PARTIALS + partials


def _numbers(tokens: Tensor) -> Tensor:
    """Return the places of captions (n, words) in the product of all words."""
    numbers = torch.zeros(len(tokens), dtype=torch.int64)
    for slot, (words, first) in enumerate(zip(LANGUAGE.slots, LANGUAGE.first_ids, strict=True)):
        numbers = numbers * len(words) + tokens[:, slot] - first
    return numbers
