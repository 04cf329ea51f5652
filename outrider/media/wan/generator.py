"""Wan's transformer as a block generator.

The arrangement is that of Self-Forcing (https://arxiv.org/abs/2506.08009): a block of latent frames attends to the
cached clean blocks and to itself, in both directions. It is denoised in a few steps with fresh noise between them. A
pass over the clean block, at noise level 0, writes its keys and values into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.models.cache import BlockCache
from outrider.media.wan.attention import CachedAttention, KeyValue, Pass

SELF_FORCING_STEPS = (1.0, 0.9375, 0.8333, 0.625)  # noise levels of 1000, 750, 500, 250 with a shift of 5
_TIMESTEPS = 1000  # Wan's timestep of noise level 1


class WanBlockGenerator:
    """A `WanTransformer3DModel` of diffusers, as the target or the drafter of a `MediaEngine`.

    The model's self-attention is replaced, so give the model to nothing else.

    Args:
        model: the transformer, with weights of a block-causal few-step model; text to video, without image inputs.
        encode: returns the text states of a prompt, (text tokens, text width), as the pipeline of the model makes them.
        blocks: the most blocks of a video.
        frames: latent frames of a block.
        height: rows of a latent frame.
        width: columns of a latent frame.
        steps: noise levels of the denoising passes, descending, from 0 to 1.
        window: past blocks that a block attends to; None: all.

    Raises:
        OutriderError: the latents do not fit the model's patches, the model wants images, or the video is too long.
    """

    def __init__(
        self,
        model: Any,
        encode: Callable[[str], Tensor],
        *,
        blocks: int,
        frames: int,
        height: int,
        width: int,
        steps: tuple[float, ...] = SELF_FORCING_STEPS,
        window: int | None = None,
    ) -> None:
        patch = tuple(model.config.patch_size)
        _check(model, patch, blocks=blocks, frames=frames, height=height, width=width)
        self.blocks = blocks
        self.latent_shape: tuple[int, ...] = (frames, model.config.in_channels, height, width)
        self.current: Pass | None = None
        self._model = model.eval()
        self._encode = encode
        self._steps = steps
        self._window = blocks if window is None else window
        self._grid = (frames // patch[0], height // patch[1], width // patch[2])
        self._text: dict[int, Tensor] = {}
        for number, layer in enumerate(model.blocks):
            layer.attn1.set_processor(CachedAttention(number, self))

    @torch.inference_mode()
    def open(self, prompt: str) -> WanCache:
        """Return the empty cache of a video."""
        weight = self._model.proj_out.weight
        config = self._model.config
        empty = weight.new_zeros(config.num_attention_heads, 0, config.attention_head_dim)
        blocks = BlockCache([(empty, empty)] * len(self._model.blocks), self._window)
        return WanCache(blocks, self._encode(prompt)[None].to(weight))

    @torch.inference_mode()
    def generate(self, block: int, noise: Tensor, cache: WanCache) -> Tensor:
        """Return the latent of a block. The noise between the steps follows from `noise`. The cache does not change."""
        if block != cache.blocks.committed:
            raise OutriderError(f"block {block} follows {cache.blocks.committed} committed blocks; commit in order")
        fresh = torch.Generator().manual_seed(int(noise.flatten()[0].cpu().float().view(torch.int32)) % 2**31)
        x = noise
        for i, level in enumerate(self._steps):
            velocity, _ = self._pass(x, level, cache)
            clean = x - level * velocity
            if i + 1 == len(self._steps):
                break
            below = self._steps[i + 1]
            x = (1 - below) * clean + below * torch.randn(noise.shape, generator=fresh).to(noise)
        return clean

    @torch.inference_mode()
    def commit(self, latent: Tensor, cache: WanCache) -> None:
        """Write a clean block into the cache, in one pass."""
        _, written = self._pass(latent, 0.0, cache)
        cache.blocks.append(written)

    def _pass(self, x: Tensor, level: float, cache: WanCache) -> tuple[Tensor, list[KeyValue]]:
        """Return the velocity of the flow, of the shape of a latent, and the keys and values of the block."""
        weight = self._model.proj_out.weight
        self.current = Pass(cache.blocks, self._rotation(cache.blocks.committed))
        timestep = torch.tensor([level * _TIMESTEPS], device=weight.device)
        video = x.to(weight).transpose(0, 1)[None]  # 1, channels, frames, rows, columns
        (velocity,) = self._model(video, timestep, cache.text, return_dict=False)
        written = self.current.written
        self.current = None
        return velocity[0].transpose(0, 1).to(x), written

    def _rotation(self, block: int) -> KeyValue:
        """Return cosines and sines of the tokens of a block, from the model's tables."""
        rope = self._model.rope
        frames, rows, columns = self._grid
        places = (
            torch.arange(block * frames, (block + 1) * frames).view(-1, 1, 1),
            torch.arange(rows).view(1, -1, 1),
            torch.arange(columns).view(1, 1, -1),
        )
        parts = []
        for table in (rope.freqs_cos, rope.freqs_sin):
            axes = table.split([rope.t_dim, rope.h_dim, rope.w_dim], dim=1)
            picked = [axis[place.to(axis.device)] for axis, place in zip(axes, places, strict=True)]
            joined = torch.cat([each.expand(frames, rows, columns, -1) for each in picked], dim=-1)
            parts.append(joined.reshape(frames * rows * columns, 1, -1)[..., ::2])  # each angle is there twice
        cos, sin = parts
        return cos, sin


class WanCache:
    """The clean blocks of a video and the states of its prompt."""

    def __init__(self, blocks: BlockCache, text: Tensor) -> None:
        self.blocks = blocks
        self.text = text


def _check(model: Any, patch: tuple[int, ...], *, blocks: int, frames: int, height: int, width: int) -> None:
    sizes = (frames, height, width)
    if any(size % each for size, each in zip(sizes, patch, strict=True)):
        raise OutriderError(f"latents of {frames} x {height} x {width} do not fit patches of {patch}; use multiples")
    if model.config.image_dim is not None or model.config.added_kv_proj_dim is not None:
        raise OutriderError("this Wan model wants an image beside the text; use a text-to-video model")
    longest = model.config.rope_max_seq_len * patch[0]
    if blocks * frames > longest:
        raise OutriderError(f"{blocks} blocks of {frames} frames are beyond the model's {longest}; use fewer blocks")
