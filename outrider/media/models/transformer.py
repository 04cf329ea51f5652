"""A block-causal transformer over the patches of latent frames, for flow matching in a few steps.

A block attends to the caption, to the clean blocks of its window, and to itself. It predicts the
clean block from a noisy one. The layers are modulated by the noise level, as in DiT
(https://arxiv.org/abs/2212.09748), with one modulation for all layers and a table for each layer,
as in PixArt (https://arxiv.org/abs/2310.00426).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.media.models.config import BlockConfig, GeneratorConfig

KeyValue = tuple[Tensor, Tensor]
CLEAN = 0.0  # the noise level of a clean block
_TIME_CHANNELS = 32
_ROTARY_BASE = 100.0


class Text(NamedTuple):
    """The inputs of a pass that come from captions."""

    condition: Tensor  # added to the first states of all tokens, (..., width)
    layers: list[KeyValue]  # keys and values for each layer


class Layer(nn.Module):
    """Self-attention and an MLP, both modulated by the noise level."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, config.mlp * width)
        self.down = nn.Linear(config.mlp * width, width, bias=False)
        self.text_kv = nn.Linear(config.text_width, 2 * width, bias=False)
        self.modulation = nn.Parameter(torch.zeros(config.repeats, 6, width))

    def split(self, x: Tensor) -> Tensor:
        """Return (..., tokens, width) as (..., heads, tokens, channels of a head)."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-2, -3)

    def text(self, states: Tensor) -> KeyValue:
        """Return the keys and values of the caption, from (..., words, text width)."""
        keys, values = self.text_kv(states).chunk(2, dim=-1)
        return functional.normalize(self.split(keys), dim=-1), self.split(values)

    def project(self, x: Tensor, modulation: Sequence[Tensor], rotation: KeyValue) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values. Queries and keys are unit vectors, rotated by the time of their frame."""
        queries, keys, values = self._split_states(x, modulation)
        return _turn(queries, rotation), _turn(keys, rotation), values

    def keys_and_values(self, x: Tensor, modulation: Sequence[Tensor], rotation: KeyValue) -> KeyValue:
        """Return the keys and values of `project`, with the same bits."""
        # One product for all three, as in `project`: a product of another shape may round in another way.
        _, keys, values = self._split_states(x, modulation)
        return _turn(keys, rotation), values

    def finish(self, x: Tensor, attended: Tensor, modulation: Sequence[Tensor]) -> Tensor:
        """Return the states after attention and the MLP."""
        x = x + modulation[2] * self.out(attended.transpose(-2, -3).flatten(-2))
        states = functional.layer_norm(x, x.shape[-1:]) * (1 + modulation[4]) + modulation[3]
        hidden: Tensor = self.down(functional.gelu(self.up(states), approximate="tanh"))
        return x + modulation[5] * hidden

    def _split_states(self, x: Tensor, modulation: Sequence[Tensor]) -> list[Tensor]:
        shift, scale = modulation[0], modulation[1]
        states = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return list(map(self.split, self.qkv(states).chunk(3, dim=-1)))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the queries attend to."""
        scale = math.sqrt(queries.shape[-1])  # of unit vectors: logits from -scale to scale
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


class BlockTransformer(nn.Module):
    """The network of a target or a drafter."""

    def __init__(self, config: GeneratorConfig, video: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.video = video
        side = video.latent_size // config.patch
        self.frame_tokens = side * side
        self.block_tokens = video.frames * self.frame_tokens
        values = video.channels * config.patch**2
        words = video.language.num_tokens
        self.embed = nn.Linear(values, config.width)
        self.place = nn.Parameter(0.02 * torch.randn(self.frame_tokens, config.width))
        self.words = nn.Embedding(video.language.num_words, config.text_width)
        self.slots = nn.Parameter(0.02 * torch.randn(words, config.text_width))
        self.text_mix = nn.Sequential(
            nn.Linear(words * 16, config.text_width), nn.SiLU(), nn.Linear(config.text_width, config.text_width)
        )
        self.text_small = nn.Linear(config.text_width, 16)
        self.text_in = nn.Linear(config.text_width, config.width)
        self.time = nn.Sequential(
            nn.Linear(_TIME_CHANNELS, config.text_width), nn.SiLU(), nn.Linear(config.text_width, 6 * config.width)
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, values)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def depth(self) -> int:
        """How many layers a pass runs, repeats counted."""
        return self.config.layers * self.config.repeats

    @property
    def pass_work(self) -> int:
        """Multiplications of a pass over one block with a full window, of linear layers and attention."""
        width = self.config.width
        keys = self.video.language.num_tokens + (self.config.window + 1) * self.block_tokens
        per_token = (4 + 2 * self.config.mlp) * width**2 + 2 * keys * width
        return self.block_tokens * (self.depth * per_token + 2 * self.embed.in_features * width)

    def layer(self, index: int) -> Layer:
        """Return the layer at a depth of the pass."""
        layer = self.layers[index % self.config.layers]
        assert isinstance(layer, Layer)
        return layer

    def read_text(self, tokens: Tensor) -> Text:
        """Return what captions give to a pass, from ids (..., words)."""
        states = self.words(tokens) + self.slots
        mixed = self.text_mix(self.text_small(states).flatten(-2))
        states = states + mixed.unsqueeze(-2)
        cached = [self.layer(i).text(states) for i in range(self.config.layers)]
        return Text(condition=self.text_in(mixed), layers=cached * self.config.repeats)

    def modulations(self, noise: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the six modulations of each layer of a pass.

        Args:
            noise: noise levels from 0 to 1, of any shape; the modulations have this shape, then the width.
        """
        frequencies = torch.exp(torch.linspace(0, math.log(1000.0), _TIME_CHANNELS // 2))
        angles = noise.unsqueeze(-1) * frequencies
        shared: Tensor = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        shared = shared.reshape(*noise.shape, 6, -1)
        tables = [self.layer(i).modulation[i // self.config.layers] for i in range(self.depth)]
        return [(shared + table).unbind(-2) for table in tables]

    def rotation(self, first_frame: int, frames: int) -> KeyValue:
        """Return cosines and sines, (tokens, half of the channels of a head), of the tokens of some frames."""
        half = self.config.width // self.config.heads // 2
        frequencies = _ROTARY_BASE ** (-torch.arange(half) / half)
        times = torch.arange(first_frame, first_frame + frames).repeat_interleave(self.frame_tokens)
        angles = times.unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()

    def to_tokens(self, latents: Tensor) -> Tensor:
        """Return latents (..., frames, channels, rows, columns) as tokens (..., tokens, values)."""
        patch, side = self.config.patch, self.video.latent_size // self.config.patch
        parts = latents.reshape(*latents.shape[:-2], side, patch, side, patch)  # ... f c y p x q
        return parts.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-4, -2)  # ... f y x c p q, joined

    def to_latents(self, tokens: Tensor) -> Tensor:
        """Return tokens (..., tokens, values) as latents. The inverse of `to_tokens`."""
        patch, side = self.config.patch, self.video.latent_size // self.config.patch
        parts = tokens.reshape(*tokens.shape[:-2], -1, side, side, self.video.channels, patch, patch)
        return parts.movedim((-5, -4), (-4, -2)).flatten(-2).flatten(-3, -2)

    def enter(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Return the first states of tokens (..., tokens, values), with the caption's part (..., width)."""
        frames: Tensor = self.embed(tokens).unflatten(-2, (-1, self.frame_tokens))
        return (frames + self.place).flatten(-3, -2) + condition.unsqueeze(-2)

    def leave(self, x: Tensor) -> Tensor:
        """Return the clean values that the last states predict."""
        values: Tensor = self.head(functional.layer_norm(x, x.shape[-1:]))
        return values


def _turn(x: Tensor, rotation: KeyValue) -> Tensor:
    return rotate(functional.normalize(x, dim=-1), rotation)


def rotate(x: Tensor, rotation: KeyValue) -> Tensor:
    """Rotate pairs of channels of (..., tokens, channels) by the angles of their tokens."""
    cos, sin = rotation
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)
