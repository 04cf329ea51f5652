"""The random numbers of `core/noise.py` in kernels, and sampling from sums of probability over blocks of a vocabulary.

Seeds and positions are int64 in memory and unsigned in the hash, whose products wrap around.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.core.noise import GOLDEN, NoiseStream

_GOLDEN = tl.constexpr(GOLDEN % 2**64)
_TARGET = tl.constexpr(NoiseStream.TARGET * GOLDEN % 2**64)
_RACE = tl.constexpr(NoiseStream.RACE * GOLDEN % 2**64)
_ACCEPT = tl.constexpr(NoiseStream.ACCEPT * GOLDEN % 2**64)


@triton.jit
def mix(x) -> tl.tensor:
    """Hash uint64 to uint64 with the finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def to_uniform(bits) -> tl.tensor:
    """Map the upper 48 bits to float64 in [0, 1)."""
    return (bits >> 16).to(tl.int64).to(tl.float64) * 3.552713678800501e-15  # 2**-48


@triton.jit
def _key(seed, stream, position):
    return mix(mix(seed.to(tl.uint64) + stream) + position.to(tl.uint64) * _GOLDEN)


@triton.jit
def target_uniform(seed, first, ahead) -> tl.tensor:
    """Return the number that samples the token `ahead` positions after the first one of the round."""
    return to_uniform(_key(seed, _TARGET, first + ahead))


@triton.jit
def race_uniform(seed, first, ahead, ids) -> tl.tensor:
    """Return the numbers of the exponential race for that token, at token ids `ids`."""
    return to_uniform(mix(_key(seed, _RACE, first + ahead) + ids.to(tl.uint64) * _GOLDEN))


@triton.jit
def clamp_prob(prob) -> tl.tensor:
    """Clamp to [0, 1]. NaN (no mass in p and q) becomes 0."""
    return tl.where(prob >= 1, 1.0, tl.where(prob > 0, prob, 0.0))


@triton.jit
def accepts(seed, first, index, prob) -> tl.tensor:
    """Return whether acceptance decision `index` of the round, which has probability `prob`, is positive."""
    return to_uniform(mix(_key(seed, _ACCEPT, first) + (index + 1).to(tl.uint64) * _GOLDEN)) < prob


@triton.jit
def find_block(sums, threshold) -> tuple[tl.tensor, tl.tensor]:
    """Return the first block at whose end the cumulative mass exceeds `threshold`, and the mass before it.

    Args:
        sums: [blocks] float64, the mass of each block.
    """
    block = tl.arange(0, sums.shape[0])
    cumulative = tl.cumsum(sums, 0)
    # Rounding may put the threshold at the end of the last block that has mass.
    last = tl.max(tl.where(sums > 0, block, 0), 0)
    found = tl.min(tl.where((cumulative > threshold) & (sums > 0), block, last), 0)
    return found, tl.sum(tl.where(block == found, cumulative - sums, 0.0), 0)


@triton.jit
def find_token(mass, ids, below, threshold, vocab) -> tl.tensor:
    """Return the first id of a block at which the cumulative mass exceeds `threshold`. `below` is the mass before it.

    Args:
        mass: [BLOCK] float64.
        ids: [BLOCK] token ids.
    """
    cumulative = below + tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, ids, -1), 0)
    last = tl.where(last < 0, vocab - 1, last)
    return tl.min(tl.where((cumulative > threshold) & (mass > 0), ids, last), 0)
