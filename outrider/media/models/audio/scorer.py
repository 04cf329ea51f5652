"""How well sounds match a caption: a probability for each window of samples."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.media.models.audio.config import LANGUAGE, AudioConfig
from outrider.media.models.audio.spectrum import log_spectra
from outrider.media.models.config import ScorerConfig
from outrider.media.models.scorer import CaptionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundScorerConfig(ScorerConfig):
    """A model that says how well a window of samples matches a caption."""

    width: int = 32
    window: int = 8  # hops of a window
    step: int = 4  # hops from one window to the next


class SoundMatchModel(CaptionTower):
    """Embeds windows of samples and captions."""

    def __init__(self, config: SoundScorerConfig, audio: AudioConfig) -> None:
        super().__init__(config, LANGUAGE)
        self.audio = audio
        self.window = config.window * audio.hop
        self.step = config.step * audio.hop
        width = config.width
        self.sound = nn.Sequential(
            nn.Conv1d(audio.channels, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv1d(width, 2 * width, 3, padding=1),
            nn.SiLU(),
        )
        self.sound_out = nn.Linear(4 * width, config.embedding)

    def parts(self, content: Tensor) -> Tensor:
        """Return the windows of samples, (n, window). They overlap by half."""
        return content.unfold(0, min(self.window, len(content)), self.step)

    def embed(self, parts: Tensor) -> Tensor:
        """Return (n, embedding) of windows of samples, (n, window)."""
        frames = parts.unfold(-1, 2 * self.audio.hop, self.audio.hop)
        spectra = (log_spectra(frames) - self.audio.mean) / self.audio.deviation
        features = self.sound(spectra.transpose(-1, -2))
        pooled = torch.cat([features.mean(-1), features.amax(-1)], dim=-1)
        embedding: Tensor = self.sound_out(pooled)
        return embedding
