"""Stateless random numbers: functions of seed, stream and absolute position. They are equal on every device.

The noise that samples the token at a position (streams TARGET and RACE) is keyed by that position, which is emitted
once. The noise that is used within a round (ACCEPT, DRAFT) is keyed by the first position of the round, which increases
in every round. If it were keyed by the position of the node, the next round would reuse the noise of a rejected draft
token. That noise is conditioned on the rejection, so the output would be biased.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Protocol

import torch

from outrider.core import devices

_STREAM_STRIDE = 1 << 20  # most random numbers that one proposer uses in a round
_ALL_BITS = (1 << 64) - 1


class NoiseStream(IntEnum):
    """Independent random streams of one seed."""

    TARGET = 1  # the token at a position
    RACE = 2  # exponential noise at a position, shared by draft and target
    ACCEPT = 3  # acceptance decisions of a verifier
    DRAFT = 4  # samples of a proposer


class Noise(Protocol):
    """The only source of randomness of a verifier."""

    def sample(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Sample from `probs` [..., V] the token that is `ahead` [...] positions after the first one of the round."""

    def sample_race(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Sample as `sample` does, with the exponential noise that the draft uses as well (Daliri et al. 2024)."""

    def bernoulli(self, prob: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return True with probability `prob`, [B] or [B, N]. `index`, of the same shape, is unique within a round."""


class PositionNoise:
    """The noise of an engine, for the sequences of a batch in one round."""

    def __init__(self, seed: torch.Tensor, first: torch.Tensor) -> None:
        """Create noise from `seed` [B] int64, for sequences whose round starts at position `first` [B] int64."""
        self.seed = seed
        self.first = first
        self._stream_keys: dict[NoiseStream, torch.Tensor] = {}  # [B] by stream; they depend on the seed only

    def at(self, first: torch.Tensor) -> PositionNoise:
        """Return the noise of the same sequences in another round."""
        other = PositionNoise(self.seed, first)
        other._stream_keys = self._stream_keys
        return other

    def sample(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(probs, self._uniform(NoiseStream.TARGET, ahead))

    def sample_race(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        key = self.race_keys(ahead)[..., None]
        uniform = to_uniform(mix(key + torch.arange(probs.shape[-1], device=probs.device) * GOLDEN))
        arrival = -torch.log1p(-uniform) / probs.double()
        return torch.where(probs > 0, arrival, torch.inf).argmin(-1)

    def race_keys(self, ahead: torch.Tensor) -> torch.Tensor:
        """Return the int64 keys of the exponential noise at positions that are `ahead` of the first one."""
        return self._key(NoiseStream.RACE, ahead)

    def bernoulli(self, prob: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self._per_round(NoiseStream.ACCEPT, index) < prob

    def uniforms(self, count: int, stream: int = 0) -> torch.Tensor:
        """Return uniform numbers [B, count] that sample draft tokens in this round; `stream` separates proposers."""
        begin = stream * _STREAM_STRIDE
        if not devices.is_cpu(self.first.device):
            index = torch.arange(begin, begin + count, device=self.first.device).expand(len(self.first), count)
            return self._per_round(NoiseStream.DRAFT, index)
        # A pass displaces code from the caches of the processor. After it, an operation of torch or NumPy takes as long
        # as dozens of these numbers.
        uniform = array("d")
        for stream_key, first in zip(self._stream_key(NoiseStream.DRAFT).tolist(), self.first.tolist(), strict=True):
            key = mix_integer(stream_key + first * GOLDEN)
            bits = [mix_integer(key + index * GOLDEN) for index in range(begin + 1, begin + count + 1)]
            uniform.extend([(each >> 16) * 2.0**-48 for each in bits])
        if not uniform:  # which `frombuffer` refuses
            return torch.empty(len(self.first), count, dtype=torch.float64)
        return torch.frombuffer(uniform, dtype=torch.float64).view(-1, count)

    def _key(self, stream: NoiseStream, ahead: torch.Tensor) -> torch.Tensor:
        shape = (-1,) + (1,) * (ahead.dim() - 1)
        return mix(self._stream_key(stream).view(shape) + (self.first.view(shape) + ahead) * GOLDEN)

    def _stream_key(self, stream: NoiseStream) -> torch.Tensor:
        if stream not in self._stream_keys:
            self._stream_keys[stream] = mix(self.seed + torch.tensor(int(stream), device=self.seed.device) * GOLDEN)
        return self._stream_keys[stream]

    def _uniform(self, stream: NoiseStream, ahead: torch.Tensor) -> torch.Tensor:
        return to_uniform(self._key(stream, ahead))

    def _per_round(self, stream: NoiseStream, index: torch.Tensor) -> torch.Tensor:
        key = self._key(stream, torch.zeros_like(self.first)).view((-1,) + (1,) * (index.dim() - 1))
        return to_uniform(mix(key + (index + 1) * GOLDEN))


GOLDEN = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed integer


def mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 to int64 with the finalizer of splitmix64 (Steele et al. 2014). Products wrap around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def mix_integer(x: int) -> int:
    """Return the bits of `mix` of an integer, as a number without a sign."""
    x &= _ALL_BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ALL_BITS
    return x ^ (x >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th completion of a request. The first one has the seed of the request."""
    if index == 0:
        return seed
    return mix_integer(seed + index * GOLDEN) & (2**63 - 1)


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """Map the upper 48 bits to float64 in [0, 1). 48 bits are few enough that u * total < total after rounding."""
    return ((bits >> 16) & 0xFFFFFFFFFFFF).double() * 2.0**-48


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative mass exceeds u times the total. `probs` [..., V] need not sum to 1."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True)[..., 0].clamp(
        max=probs.shape[-1] - 1
    )
