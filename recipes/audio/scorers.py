"""Trains the models that score windows of sound."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.scorer import SoundMatchModel, SoundScorerConfig
from outrider.media.models.audio.synthesizer import StreamingSynthesizer
from recipes.audio.fits import CaptionFits
from recipes.media.clips import Clips
from recipes.media.scorers import Batch, damage, pair_loss, slightly_noisy, train_scorer

_MARGIN = 4  # frames before a window, whose sound is not used: the synthesizer starts in them
_HEARD = (0, 2, 3)  # the words of which one is wrong: timbre, height and note


def train_sound_scorer(
    config: SoundScorerConfig, audio: AudioConfig, clips: Clips, *, steps: int, file: Path, seed: int
) -> SoundMatchModel:
    """Return a trained scorer. It learns from samples that the synthesizer made, as it will hear them."""
    torch.manual_seed(seed)
    model = SoundMatchModel(config, audio)
    caption_fits = CaptionFits(audio)
    frames = config.window + _MARGIN

    def loss(batch: Batch, generator: torch.Generator) -> Tensor:
        whole = batch.latents[:, batch.first : batch.first + frames]
        true = slightly_noisy(whole, 0.1, generator)
        sounds = model.embed(_decode(torch.cat([true, damage_sounds(whole, generator)]), audio))

        def fits(captions: Tensor) -> Tensor:
            # Samples come one hop after their frame, so the last frame of the window is heard only in part.
            return caption_fits(captions, batch.tokens, batch.first + _MARGIN, config.window - 1)

        return pair_loss(model, sounds, batch.tokens, _HEARD, fits, generator)

    train_scorer(model, clips, loss, frames=frames, steps=steps, file=file, seed=seed)
    return model


def damage_sounds(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Return clips with the faults of weak generators: noise, smeared pitch, lost loudness, or another sound in it.

    Args:
        clips: latents, (n, frames, channels, 1, 1).
        generator: of the damage.
    """

    def faults(strength: Tensor) -> list[Tensor]:
        smeared = functional.avg_pool1d(clips[..., 0, 0], 5, stride=1, padding=2)[..., None, None]
        silence = clips.amin((1, 2), keepdim=True)
        faint = silence + (0.6 - 0.4 * strength) * (clips - silence)
        mixed = torch.maximum(clips, silence + strength * (clips.roll(1, 0) - silence))
        return [smeared, faint, mixed]

    return damage(clips, faults, generator)


def _decode(clips: Tensor, audio: AudioConfig) -> Tensor:
    """Return the samples of each clip's window, (n, samples)."""
    decoder = StreamingSynthesizer(audio)
    sounds = []
    for clip in clips:
        decoder.reset()
        sounds.append(decoder.decode(clip)[_MARGIN * audio.hop :])
    return torch.stack(sounds)
