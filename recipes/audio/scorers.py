"""Trains the models that score windows of sound: true pairs against wrong captions and damaged sounds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.audio.captions import LANGUAGE
from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.scorer import SoundMatchModel, SoundScorerConfig
from outrider.media.models.audio.synthesizer import StreamingSynthesizer
from recipes.video.loop import train
from recipes.video.scorers import one_wrong_word

_BATCH = 48  # clips
_MARGIN = 4  # frames before a window, whose sound is not used: the synthesizer starts in them
_SEEN = (0, 2, 3)  # the words that any window lets hear: timbre, height and note


def train_scorer(
    config: SoundScorerConfig,
    audio: AudioConfig,
    latents: Tensor,
    tokens: Tensor,
    *,
    steps: int,
    file: Path,
    seed: int,
) -> SoundMatchModel:
    """Return a trained scorer. It learns from samples that the synthesizer made, as it will hear them."""
    torch.manual_seed(seed)
    model = SoundMatchModel(config, audio)
    frames = config.window + _MARGIN

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(latents), (_BATCH,), generator=generator)
        first = int(torch.randint(latents.shape[1] - frames + 1, (), generator=generator))
        clips = latents[rows, first : first + frames].float()
        return pair_loss(model, clips, tokens[rows], generator)

    train(model, loss, steps=steps, lr=2e-3, file=file, seed=seed)
    return model


def pair_loss(model: SoundMatchModel, clips: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return the cross entropy of right pairs, of pairs with a wrong word or caption, and of damaged sounds.

    Args:
        model: the scorer.
        clips: latents of a window and the frames before it, (n, frames, channels, 1, 1).
        tokens: the captions, (n, words).
        generator: of the damage and the wrong words.
    """
    slight = 0.1 * torch.rand(len(clips), 1, 1, 1, 1, generator=generator)
    true = clips + slight * torch.randn(clips.shape, generator=generator)
    sounds = model.embed_windows(_decode(torch.cat([true, damage(clips, generator)]), model.audio))
    captions = [tokens, *(one_wrong_word(tokens, _SEEN, generator, LANGUAGE) for _ in range(3)), tokens.roll(1, 0)]
    losses = []
    for i, caption in enumerate(captions):
        embedding, offset = model.embed_captions(caption)
        label = (caption == tokens).all(-1).float()
        logits = (sounds[: len(tokens)] * embedding).sum(-1) + offset
        losses.append(functional.binary_cross_entropy_with_logits(logits, label))
        if i == 0:
            logits = (sounds[len(tokens) :] * embedding).sum(-1) + offset
            losses.append(functional.binary_cross_entropy_with_logits(logits, torch.zeros(len(tokens))))
    return 2 * losses[0] + losses[1] + sum(losses[2:]) / 2


def damage(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Return clips with the faults of weak generators: noise, smeared pitch, lost loudness, or another sound in it."""
    kinds = torch.randint(4, (len(clips), 1, 1, 1, 1), generator=generator)
    strength = 0.5 + 0.5 * torch.rand(kinds.shape, generator=generator)
    noisy = clips + strength * torch.randn(clips.shape, generator=generator)
    smeared = functional.avg_pool1d(clips[..., 0, 0], 5, stride=1, padding=2)[..., None, None]
    silence = clips.amin((1, 2), keepdim=True)
    faint = silence + (0.6 - 0.4 * strength) * (clips - silence)
    mixed = torch.maximum(clips, silence + strength * (clips.roll(1, 0) - silence))
    out = torch.where(kinds == 0, noisy, smeared)
    out = torch.where(kinds == 2, faint, out)
    return torch.where(kinds == 3, mixed, out)


def _decode(clips: Tensor, audio: AudioConfig) -> Tensor:
    """Return the samples of each clip's window, (n, samples)."""
    decoder = StreamingSynthesizer(audio)
    sounds = []
    for clip in clips:
        decoder.reset()
        sounds.append(decoder.decode(clip)[_MARGIN * audio.hop :])
    return torch.stack(sounds)
