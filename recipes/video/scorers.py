"""Trains the models that score frames."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.config import ScorerConfig
from outrider.media.models.scorer import MatchModel
from outrider.media.models.vae import Decoder
from recipes.media.clips import Clips
from recipes.media.scorers import Batch, damage, pair_loss, slightly_noisy, train_scorer

_FRAMES = 3  # of a clip in a batch, the last one or two of which are scored
_SEEN = (0, 1, 5)  # the words that any frame shows: color, shape and background


def train_frame_scorer(
    config: ScorerConfig, decoder: Decoder, clips: Clips, *, steps: int, file: Path, seed: int
) -> MatchModel:
    """Return a trained scorer. It learns from frames that the decoder made, as it will see them."""
    torch.manual_seed(seed)
    model = MatchModel(config)

    def loss(batch: Batch, generator: torch.Generator) -> Tensor:
        whole = batch.latents[:, batch.first : batch.first + _FRAMES]
        true = _decode(decoder, slightly_noisy(whole, 0.15, generator), config.frames)
        damaged = _decode(decoder, damage_frames(batch.latents, whole, generator), config.frames)
        frames = model.embed(torch.cat([true, damaged]))

        def fits(captions: Tensor) -> Tensor:
            return (captions == batch.tokens)[:, list(_SEEN)].all(-1)

        return pair_loss(model, frames, batch.tokens, _SEEN, fits, generator)

    train_scorer(model, clips, loss, frames=_FRAMES, steps=steps, file=file, seed=seed)
    return model


def damage_frames(latents: Tensor, whole: Tensor, generator: torch.Generator) -> Tensor:
    """Return frames with the faults of weak generators: noise, blur, a second exposure, or another clip mixed in.

    Args:
        latents: whole clips, (n, frames, channels, rows, columns).
        whole: the frames of them that are damaged.
        generator: of the damage.
    """

    def faults(strength: Tensor) -> list[Tensor]:
        frames = whole.flatten(0, 1)
        blurred = functional.avg_pool2d(frames, 3, stride=1, padding=1, count_include_pad=False).view_as(whole)
        far = (latents[:, -_FRAMES:] + latents[:, :_FRAMES]) / 2
        mixed = whole + 0.6 * strength * (whole.roll(1, 0) - whole)
        return [blurred, far, mixed]

    return damage(whole, faults, generator)


@torch.no_grad()
def _decode(decoder: Decoder, latents: Tensor, frames: int) -> Tensor:
    """Return the last frames of each clip, (n, frames x 3, rows, columns), newest first."""
    clips = []
    for clip in latents:
        decoded, _ = decoder(clip)
        clips.append(torch.cat([decoded[-1 - back] for back in range(frames)]))
    return torch.stack(clips).clamp(0.0, 1.0)
