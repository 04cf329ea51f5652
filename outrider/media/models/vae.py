"""An autoencoder of frames whose decoder streams: it keeps the last frames' features and decodes block after block."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.media.models.config import AutoencoderConfig, VideoConfig

_PAST = 2  # frames that the causal convolution over time looks back
_SHRINK = 4  # how many times smaller the rows and columns of a latent frame are


class Encoder(nn.Module):
    """Frames to the mean and the log-variance of their latents. Frames are encoded on their own."""

    def __init__(self, config: AutoencoderConfig, video: VideoConfig) -> None:
        super().__init__()
        width = config.encoder_width
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(_SHRINK),
            nn.Conv2d(3 * _SHRINK**2, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * video.channels, 1),
        )

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, each (n, channels, rows / 4, columns / 4), of frames (n, 3, rows, columns)."""
        mean, log_variance = self.layers(frames).chunk(2, dim=1)
        return mean, log_variance.clamp(-12.0, 4.0)


class Decoder(nn.Module):
    """Latents to frames. A convolution over time reads the current frame and the last two."""

    def __init__(self, config: AutoencoderConfig, video: VideoConfig) -> None:
        super().__init__()
        width = config.width
        self.enter = nn.Conv2d(video.channels, width, 3, padding=1)
        self.time = nn.Conv1d(width, width, _PAST + 1)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.widen = nn.Conv2d(width, 4 * config.full_width, 3, padding=1)
        self.last = nn.Conv2d(config.full_width, 12, 3, padding=1)
        # Latents are stored with mean 0 and deviation 1 for each channel.
        self.register_buffer("mean", torch.zeros(video.channels))
        self.register_buffer("deviation", torch.ones(video.channels))
        self.mean: Tensor
        self.deviation: Tensor

    def forward(self, latents: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decode the next frames of a video.

        Args:
            latents: (frames, channels, rows, columns).
            past: what the last call returned; None at the start of a video.

        Returns:
            The frames, (frames, 3, 4 rows, 4 columns), from 0 to 1 apart from small errors; and the new past.
        """
        latents = latents * self.deviation[:, None, None] + self.mean[:, None, None]
        x = functional.silu(self.enter(latents))
        if past is None:
            past = x[:1].expand(_PAST, -1, -1, -1)
        joined = torch.cat([past, x])
        x = x + self._over_time(joined)
        x = x + functional.silu(self.mix(x))
        x = functional.silu(functional.pixel_shuffle(self.widen(x), 2))
        return functional.pixel_shuffle(self.last(x), 2), joined[-_PAST:]

    def _over_time(self, joined: Tensor) -> Tensor:
        frames, width, rows, columns = joined.shape
        lines = joined.permute(2, 3, 1, 0).reshape(rows * columns, width, frames)
        out: Tensor = functional.silu(self.time(lines))
        return out.reshape(rows, columns, width, -1).permute(3, 2, 0, 1)


class StreamingDecoder:
    """Decodes a video block by block. Its state can be kept and put back.

    Args:
        decoder: the network.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._past: Tensor | None = None

    def reset(self) -> None:
        """Start a new video."""
        self._past = None

    @torch.inference_mode()
    def decode(self, latent: Tensor) -> Tensor:
        """Return the frames of the next block, (frames, 3, rows, columns), from 0 to 1."""
        frames: Tensor
        frames, self._past = self._decoder(latent, self._past)
        return frames.clamp(0.0, 1.0)

    def snapshot(self) -> Tensor | None:
        """Return the state. Later calls do not change it."""
        return self._past

    def restore(self, state: Tensor | None) -> None:
        """Put a state back."""
        self._past = state
