"""Wan's autoencoder as a streaming decoder."""

from typing import Any

import torch
from torch import Tensor

State = tuple[Any, ...] | None


class WanStreamDecoder:
    """The decoder of an `AutoencoderKLWan` of diffusers. It keeps the features of the last frames between blocks.

    The first latent frame of a video gives one frame, each later one gives as many as the model compresses into it.

    Args:
        vae: the autoencoder, without tiling; a model with `patch_size` is not supported.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = vae.eval()
        self._count = vae._cached_conv_counts["decoder"]
        self._features: State = None
        weight = vae.post_quant_conv.weight
        self._mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(weight)
        self._deviation = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(weight)

    def reset(self) -> None:
        """Start a new video."""
        self._features = None

    @torch.inference_mode()
    def decode(self, latent: Tensor) -> Tensor:
        """Return the frames of the next block, (frames, 3, rows, columns), from 0 to 1.

        Args:
            latent: (latent frames, channels, rows, columns), with mean 0 and deviation 1 as the transformer has it.
        """
        scaled = latent.to(self._mean).transpose(0, 1)[None] * self._deviation + self._mean
        x = self._vae.post_quant_conv(scaled)
        features: list[Any] = [None] * self._count if self._features is None else list(self._features)
        frames = []
        for i in range(x.shape[2]):
            first = self._features is None and i == 0
            frames.append(self._vae.decoder(x[:, :, i : i + 1], feat_cache=features, feat_idx=[0], first_chunk=first))
        # The decoder replaces the entries of the list and writes into none of them.
        self._features = tuple(features)
        video = torch.cat(frames, dim=2)[0].transpose(0, 1)
        return (video.float() / 2 + 0.5).clamp(0.0, 1.0)

    def snapshot(self) -> State:
        """Return the state. Later calls do not change it."""
        return self._features

    def restore(self, state: State) -> None:
        """Put a state back."""
        self._features = state
