"""Trains targets and drafters of spectra on clips that begin at any block of a sound."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.config import GeneratorConfig
from outrider.media.models.transformer import BlockTransformer
from recipes.video.generators import flow_errors
from recipes.video.loop import train


def train_generator(
    config: GeneratorConfig,
    audio: AudioConfig,
    latents: Tensor,
    tokens: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    file: Path,
    seed: int,
) -> BlockTransformer:
    """Return a trained network.

    Args:
        config: its sizes.
        audio: sizes of the latents.
        latents: of whole sounds, (sounds, blocks x frames, channels, 1, 1).
        tokens: the captions, (sounds, words).
        steps: how many.
        batch: clips of a step.
        lr: peak learning rate.
        file: where the training is saved.
        seed: of the weights and the batches.
    """
    torch.manual_seed(seed)
    network = BlockTransformer(config, audio)
    blocks = latents.view(len(latents), -1, *audio.latent_shape)
    count = config.window + 1

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(blocks), (batch,), generator=generator)
        # Half of the steps begin with the sound, the others later.
        later = int(torch.randint(1, blocks.shape[1] - count + 1, (), generator=generator))
        first = later if bool(torch.randint(2, (), generator=generator)) else 0
        clips = blocks[rows, first : first + count].float()
        errors = flow_errors(network, clips, tokens[rows], generator)
        # Without its past, the first block of a later clip cannot be known, so it does not count.
        return errors[:, int(first > 0) :].mean()

    train(network, loss, steps=steps, lr=lr, file=file, seed=seed)
    return network
