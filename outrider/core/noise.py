"""Randomness as a function of (seed, stream, absolute position): stateless, equal on every device and in every batch.

Two numbers keep it exact. What decides a *token at a position* (streams TARGET and RACE) is keyed by that position,
which is emitted once. What decides *within a round* (ACCEPT, DRAFT) is keyed by the round's first position, which
grows every round: were it keyed by the node's own position, a rejected draft's noise would come back in the next
round, already conditioned on the rejection.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

_STREAM_STRIDE = 1 << 20  # numbers of a round that are one proposer's


class NoiseStream(IntEnum):
    """Independent sources under one seed."""

    TARGET = 1  # the token at a position
    RACE = 2  # the position's exponential race, shared by draft and target
    ACCEPT = 3  # the coins of a verifier
    DRAFT = 4  # the draws of a proposer


class Noise(Protocol):
    """What a verifier may ask of chance. It must not look at anything else that is random."""

    def sample(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Draw from `law` [..., V] the token that stands `ahead` [...] places after the round's first one."""

    def sample_race(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Like `token`, by the exponential race that the draft ran too (Daliri et al. 2024)."""

    def bernoulli(self, chance: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """True with probability `chance`, [B] or [B, N]; `index`, shaped alike, names the coins, new within a round."""


class PositionNoise:
    """The noise of real runs."""

    def __init__(self, seed: torch.Tensor, first: torch.Tensor) -> None:
        """Take each row's seed [B] int64 and the absolute position [B] int64 of its first token this round."""
        self.seed = seed
        self.first = first
        self._starts: dict[NoiseStream, torch.Tensor] = {}  # [B] per stream, of the seed alone

    def at(self, first: torch.Tensor) -> PositionNoise:
        """The same rows' noise in another round."""
        other = PositionNoise(self.seed, first)
        other._starts = self._starts
        return other

    def sample(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(law, self._uniform(NoiseStream.TARGET, ahead))

    def sample_race(self, law: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        key = self._key(NoiseStream.RACE, ahead)[..., None]
        uniform = to_uniform(mix(key + torch.arange(law.shape[-1], device=law.device) * GOLDEN))
        arrival = -torch.log1p(-uniform) / law.double()
        return torch.where(law > 0, arrival, torch.inf).argmin(-1)

    def bernoulli(self, chance: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self._per_round(NoiseStream.ACCEPT, index) < chance

    def uniforms(self, count: int, voice: int = 0) -> torch.Tensor:
        """Uniform numbers [B, count] for a proposer's guesses of this round; other voices have other ones."""
        begin = voice * _STREAM_STRIDE
        if self.first.device.type != "cpu":
            index = torch.arange(begin, begin + count, device=self.first.device).expand(len(self.first), count)
            return self._per_round(NoiseStream.DRAFT, index)
        # The same in NumPy, whose calls on a handful of numbers take a fifth of the time.
        key = mix(self._start(NoiseStream.DRAFT).numpy() + self.first.numpy() * GOLDEN)[:, None]
        bits = mix(key + np.arange(begin + 1, begin + count + 1) * GOLDEN)
        return torch.from_numpy(((bits >> 16) & 0xFFFFFFFFFFFF) * 2.0**-48)

    def _key(self, stream: NoiseStream, ahead: torch.Tensor) -> torch.Tensor:
        shape = (-1,) + (1,) * (ahead.dim() - 1)
        return mix(self._start(stream).view(shape) + (self.first.view(shape) + ahead) * GOLDEN)

    def _start(self, stream: NoiseStream) -> torch.Tensor:
        if stream not in self._starts:
            self._starts[stream] = mix(self.seed + torch.tensor(int(stream), device=self.seed.device) * GOLDEN)
        return self._starts[stream]

    def _uniform(self, stream: NoiseStream, ahead: torch.Tensor) -> torch.Tensor:
        return to_uniform(self._key(stream, ahead))

    def _per_round(self, stream: NoiseStream, index: torch.Tensor) -> torch.Tensor:
        key = self._key(stream, torch.zeros_like(self.first)).view((-1,) + (1,) * (index.dim() - 1))
        return to_uniform(mix(key + (index + 1) * GOLDEN))


Bits = TypeVar("Bits", torch.Tensor, NDArray[np.int64])
GOLDEN = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed integer


def mix(x: Bits) -> Bits:
    """Scramble int64 to int64: the finaliser of splitmix64 (Steele et al. 2014), whose products wrap around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def mix_int(seed: int, index: int) -> int:
    """A seed of its own for the `index`-th completion of a request; the first keeps the request's seed."""
    if index == 0:
        return seed
    return int(mix(torch.tensor(seed) + torch.tensor(index) * GOLDEN)) & (2**63 - 1)


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """Float64 in [0, 1) from the upper 48 bits: few enough that u * total < total after rounding."""
    return ((bits >> 16) & 0xFFFFFFFFFFFF).double() * 2.0**-48


def inverse_cdf(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative mass exceeds u times the total; `law` [..., V] need not be normalised."""
    cdf = law.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True)[..., 0].clamp(max=law.shape[-1] - 1)
