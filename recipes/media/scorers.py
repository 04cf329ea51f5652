"""Trains the models that score content: true pairs against wrong captions and damaged content."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.media.models.language import Language
from outrider.media.models.scorer import CaptionTower
from recipes.media.clips import Clips
from recipes.media.loop import train

_BATCH = 48  # clips
_WRONG = 3  # captions with one wrong word, for each clip of a batch


class Batch(NamedTuple):
    """Random clips, and where the frames of this step begin in them."""

    latents: Tensor  # whole clips, (n, frames, channels, rows, columns)
    tokens: Tensor  # the captions, (n, words)
    first: int  # frame


def train_scorer(
    model: CaptionTower,
    clips: Clips,
    loss: Callable[[Batch, torch.Generator], Tensor],
    *,
    frames: int,
    steps: int,
    file: Path,
    seed: int,
) -> None:
    """Train a scorer in place.

    Args:
        model: the scorer.
        clips: the training data.
        loss: of a batch. It takes its random numbers from the generator.
        frames: how many frames of a clip the loss uses, from `Batch.first`.
        steps: how many.
        file: where the training is saved.
        seed: of the batches.
    """

    def batch_loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(clips.latents), (_BATCH,), generator=generator)
        first = int(torch.randint(clips.latents.shape[1] - frames + 1, (), generator=generator))
        batch = Batch(latents=clips.latents[rows].float(), tokens=clips.tokens[rows], first=first)
        return loss(batch, generator)

    train(model, batch_loss, steps=steps, lr=2e-3, file=file, seed=seed)


def pair_loss(
    model: CaptionTower,
    content: Tensor,
    tokens: Tensor,
    slots: tuple[int, ...],
    fits: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Return the cross entropy of right pairs, of pairs with a wrong word or caption, and of damaged content.

    Args:
        model: the scorer.
        content: embeddings of the content as it is, then of the damaged content, (2n, embedding).
        tokens: the captions, (n, words).
        slots: the words of which one is wrong.
        fits: returns which of other captions, (n, words), the content may belong to as well, (n,). These are no
            mistakes.
        generator: of the wrong words.
    """
    whole, damaged = content.chunk(2)

    def error(embedded: Tensor, captions: Tensor, right: Tensor) -> Tensor:
        embedding, offset = model.embed_captions(captions)
        logits = (embedded * embedding).sum(-1) + offset
        return functional.binary_cross_entropy_with_logits(logits, right.float())

    count = len(tokens)
    wrong = [one_wrong_word(tokens, slots, generator, model.language) for _ in range(_WRONG)]
    loss = 2 * error(whole, tokens, torch.ones(count)) + error(damaged, tokens, torch.zeros(count))
    for captions in (*wrong, tokens.roll(1, 0)):
        loss = loss + error(whole, captions, fits(captions)) / 2
    return loss


def damage(clips: Tensor, faults: Callable[[Tensor], list[Tensor]], generator: torch.Generator) -> Tensor:
    """Return clips with a fault of weak generators in each.

    Args:
        clips: latents, (n, frames, channels, rows, columns).
        faults: returns the clips with three other faults than noise, of strengths from 0.5 to 1, (n, 1, 1, 1, 1).
        generator: chooses the fault and the strength, and makes the noise.
    """
    kinds = torch.randint(4, (len(clips), 1, 1, 1, 1), generator=generator)
    strength = 0.5 + 0.5 * torch.rand(kinds.shape, generator=generator)
    out = clips + strength * torch.randn(clips.shape, generator=generator)
    for kind, faulty in enumerate(faults(strength), start=1):
        out = torch.where(kinds == kind, faulty, out)
    return out


def slightly_noisy(clips: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Return clips with noise that is no fault, of a deviation from 0 to `most`."""
    slight = most * torch.rand(len(clips), 1, 1, 1, 1, generator=generator)
    return clips + slight * torch.randn(clips.shape, generator=generator)


def one_wrong_word(tokens: Tensor, slots: tuple[int, ...], generator: torch.Generator, language: Language) -> Tensor:
    """Return captions (n, words) in which one of the `slots` has another word."""
    wrong = tokens.clone()
    for row in wrong:
        slot = slots[int(torch.randint(len(slots), (), generator=generator))]
        count, first = len(language.slots[slot]), language.first_ids[slot]
        step = int(torch.randint(1, count, (), generator=generator))
        row[slot] = first + (row[slot] - first + step) % count
    return wrong
