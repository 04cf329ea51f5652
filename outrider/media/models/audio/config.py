"""The sizes of a set of audio models, as config.json holds them, and the captions that they understand."""

from dataclasses import dataclass

from outrider.media.models.config import BlockConfig
from outrider.media.models.language import Language

TIMBRES = ("pure", "hollow", "bright")  # harmonics: none, the odd ones, all
PATTERNS = ("pulse", "trill", "arpeggio", "scale", "rise", "fall")  # rise and fall are chirps
HEIGHTS = ("low", "high")
NOTES = ("do", "re", "mi", "fa", "sol", "la", "ti")
TEMPOS = ("slow", "fast")
LANGUAGE = Language(
    slots=(TIMBRES, PATTERNS, HEIGHTS, NOTES, TEMPOS),
    template="a {} {} on a {} {} at a {} tempo",
    fillers=frozenset(("a", "an", "on", "at", "tempo")),
    form="a TIMBRE PATTERN on a HEIGHT NOTE at a SPEED tempo",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig(BlockConfig):
    """The settings that all models of a set of audio models share.

    A latent frame is the spectrum at one time: its channels are the frequency bins 1, 2, ... of a Fourier transform of
    2 x channels samples. The next frame is `channels` samples later, so windows overlap by half.
    """

    frames: int = 16
    channels: int = 128
    latent_size: int = 1  # a spectrum has no rows and columns
    sample_rate: int = 8000  # samples per second
    # Of log(1 + magnitude) over the training data. Latents have mean 0 and deviation 1.
    mean: float = 0.15
    deviation: float = 0.48

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return self.channels

    @property
    def block_samples(self) -> int:
        """Samples of a block."""
        return self.frames * self.hop

    @property
    def language(self) -> Language:
        """The captions that the models understand."""
        return LANGUAGE
