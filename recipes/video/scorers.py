"""Trains the models that score frames: true pairs against wrong captions and damaged frames."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.captions import LANGUAGE
from outrider.media.models.config import ScorerConfig
from outrider.media.models.language import Language
from outrider.media.models.scorer import MatchModel
from outrider.media.models.vae import Decoder
from recipes.video.autoencoder import Clips
from recipes.video.loop import train

_BATCH = 48  # clips
_FRAMES = 3  # of a clip in a batch, the last one or two of which are scored
_SEEN = (0, 1, 5)  # the words that any frame shows: color, shape and background


def train_scorer(
    config: ScorerConfig, decoder: Decoder, clips: Clips, *, steps: int, file: Path, seed: int
) -> MatchModel:
    """Return a trained scorer. It learns from frames that the decoder made, as it will see them."""
    torch.manual_seed(seed)
    model = MatchModel(config)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(clips.latents), (_BATCH,), generator=generator)
        first = int(torch.randint(clips.latents.shape[1] - _FRAMES + 1, (), generator=generator))
        latents = clips.latents[rows].float()
        return pair_loss(model, decoder, latents, first, clips.tokens[rows], generator)

    train(model, loss, steps=steps, lr=2e-3, file=file, seed=seed)
    return model


def pair_loss(
    model: MatchModel, decoder: Decoder, latents: Tensor, first: int, tokens: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the cross entropy of right pairs, of pairs with one wrong word or a wrong caption, and of damaged frames.

    Args:
        model: the scorer.
        decoder: gives the frames.
        latents: whole clips, (n, frames, channels, rows, columns).
        first: the first frame that is used.
        tokens: the captions, (n, words).
        generator: of the damage and the wrong words.
    """
    whole = latents[:, first : first + _FRAMES]
    slight = 0.15 * torch.rand(len(whole), 1, 1, 1, 1, generator=generator)
    true = _decode(decoder, whole + slight * torch.randn(whole.shape, generator=generator), model.config.frames)
    damaged = _decode(decoder, damage(latents, whole, generator), model.config.frames)
    frames = model.embed_frames(torch.cat([true, damaged]))
    captions = [tokens, *(one_wrong_word(tokens, _SEEN, generator) for _ in range(3)), tokens.roll(1, 0)]
    losses = []
    for i, caption in enumerate(captions):
        embedding, offset = model.embed_captions(caption)
        logits = (frames[: len(tokens)] * embedding).sum(-1) + offset
        label = (caption == tokens)[:, list(_SEEN)].all(-1).float()
        losses.append(functional.binary_cross_entropy_with_logits(logits, label))
        if i == 0:
            logits = (frames[len(tokens) :] * embedding).sum(-1) + offset
            losses.append(functional.binary_cross_entropy_with_logits(logits, torch.zeros(len(tokens))))
    return 2 * losses[0] + losses[1] + sum(losses[2:]) / 2


def damage(latents: Tensor, whole: Tensor, generator: torch.Generator) -> Tensor:
    """Return frames with the faults of weak generators: noise, blur, a second exposure, or another clip mixed in."""
    kinds = torch.randint(4, (len(whole), 1, 1, 1, 1), generator=generator)
    strength = 0.5 + 0.5 * torch.rand(kinds.shape, generator=generator)
    noisy = whole + strength * torch.randn(whole.shape, generator=generator)
    blurred = functional.avg_pool2d(whole.flatten(0, 1), 3, stride=1, padding=1, count_include_pad=False).view_as(whole)
    far = (latents[:, -_FRAMES:] + latents[:, :_FRAMES]) / 2
    mixed = whole + 0.6 * strength * (whole.roll(1, 0) - whole)
    out = torch.where(kinds == 0, noisy, blurred)
    out = torch.where(kinds == 2, far, out)
    return torch.where(kinds == 3, mixed, out)


def one_wrong_word(
    tokens: Tensor, slots: tuple[int, ...], generator: torch.Generator, language: Language = LANGUAGE
) -> Tensor:
    """Return captions (n, words) in which one of the `slots` has another word."""
    wrong = tokens.clone()
    for row in wrong:
        slot = slots[int(torch.randint(len(slots), (), generator=generator))]
        count, first = len(language.slots[slot]), language.first_ids[slot]
        step = int(torch.randint(1, count, (), generator=generator))
        row[slot] = first + (row[slot] - first + step) % count
    return wrong


@torch.no_grad()
def _decode(decoder: Decoder, latents: Tensor, frames: int) -> Tensor:
    """Return the last frames of each clip, (n, frames x 3, rows, columns), newest first."""
    clips = []
    for clip in latents:
        decoded, _ = decoder(clip)
        clips.append(torch.cat([decoded[-1 - back] for back in range(frames)]))
    return torch.stack(clips).clamp(0.0, 1.0)
