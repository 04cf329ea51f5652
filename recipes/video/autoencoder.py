"""Trains the autoencoder, and encodes the training videos."""

import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.media.models.captions import random_scene
from outrider.media.models.config import AutoencoderConfig, VideoConfig
from outrider.media.models.vae import Decoder, Encoder
from recipes.family.train import say
from recipes.media.clips import Clips
from recipes.media.loop import train
from recipes.video.shapes import draw_clip, random_clips

_CLIPS = 6  # in a batch
_FRAMES = 6  # of a clip in a batch
_KL_WEIGHT = 1e-4
_ENCODED_AT_ONCE = 64  # clips


class Autoencoder(nn.Module):
    """Encoder and decoder together, as they are trained."""

    def __init__(self, config: AutoencoderConfig, video: VideoConfig) -> None:
        super().__init__()
        self.video = video
        self.encoder = Encoder(config, video)
        self.decoder = Decoder(config, video)

    def loss(self, generator: torch.Generator) -> Tensor:
        """Return the error of reconstructed random clips plus the weighted divergence of latents from N(0, 1)."""
        rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
        error = torch.zeros(())
        for _ in range(_CLIPS):
            frames = draw_clip(random_scene(rng), _FRAMES, self.video.frame_size, rng)
            mean, log_variance = self.encoder(frames)
            noise = torch.randn(mean.shape, generator=generator)
            decoded, _ = self.decoder(mean + (0.5 * log_variance).exp() * noise)
            divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
            reconstruction = functional.l1_loss(decoded, frames) + 10 * functional.mse_loss(decoded, frames)
            error = error + reconstruction + _KL_WEIGHT * divergence
        return error / _CLIPS


def train_autoencoder(
    config: AutoencoderConfig, video: VideoConfig, *, steps: int, folder: Path, seed: int
) -> Autoencoder:
    """Return a trained autoencoder whose latents have mean 0 and deviation 1."""
    torch.manual_seed(seed)
    model = Autoencoder(config, video)
    train(model, model.loss, steps=steps, lr=3e-3, file=folder / "autoencoder.pt", seed=seed)
    with torch.no_grad():
        frames, _ = random_clips(256, 1, video.frame_size, seed + 1)
        means, _ = model.encoder(frames.flatten(0, 1))
        model.decoder.mean.copy_(means.mean((0, 2, 3)))
        model.decoder.deviation.copy_(means.std((0, 2, 3)))
        decoded = torch.cat([model.decoder(normalize(model, mean[None]))[0] for mean in means])
    say(f"autoencoder: root of the mean squared error {float(functional.mse_loss(decoded, frames[:, 0]).sqrt()):.4f}")
    return model


def normalize(model: Autoencoder, means: Tensor) -> Tensor:
    """Return latents of mean 0 and deviation 1 from what the encoder gives."""
    return (means - model.decoder.mean[:, None, None]) / model.decoder.deviation[:, None, None]


@torch.no_grad()
def encode_clips(model: Autoencoder, count: int, *, frames: int, file: Path, seed: int) -> Clips:
    """Return random videos as latents, from `file` if they are there."""
    if file.exists():
        saved = torch.load(file, weights_only=True)
        return Clips(latents=saved["latents"], tokens=saved["tokens"])
    latents = []
    tokens = []
    for i in range(0, count, _ENCODED_AT_ONCE):
        clips, scenes = random_clips(min(_ENCODED_AT_ONCE, count - i), frames, model.video.frame_size, seed * 7919 + i)
        mean, _ = model.encoder(clips.flatten(0, 1))
        latents.append(normalize(model, mean).view(len(clips), frames, *mean.shape[1:]).half())
        tokens += [scene.tokens() for scene in scenes]
    encoded = Clips(latents=torch.cat(latents), tokens=torch.tensor(tokens))
    torch.save(encoded._asdict(), file)
    return encoded
