"""Maps indices of the large model to those of the small one that they copy, and divides weights among the copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import OutriderError

_ROWS = 2048  # rows that are filled at a time, so that few are in memory in full precision


def shares(source: Sequence[int]) -> list[float]:
    """Return a power of two for each copy. Those of one source add up to 1, and its smallest come last.

    Multiplication by a power of two is exact in every floating-point type, and so is the sum of the shares.
    """
    copies = Counter(source)
    seen = Counter[int]()
    result = []
    for index in source:
        depth = copies[index].bit_length() - 1
        num_larger = (2 << depth) - copies[index]  # copies whose share is not halved once more
        result.append(0.5 ** (depth + (seen[index] >= num_larger)))
        seen[index] += 1
    return result


def spread(count: int, copies: int) -> list[int]:
    """Spread `count` sources evenly over `copies` indices. Copies of one source are neighbors."""
    return [index * count // copies for index in range(copies)]


def divide(weight: Tensor, source: Sequence[int]) -> Tensor:
    """Return columns [n, copies] that give the product of [n, sources] if the copies of a source are equal."""
    return weight[:, list(source)] * weight.new_tensor(shares(source))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A residual stream of h channels, laid out over H channels.

    Channel i is copied with scales s whose squares add up to `energy`, which is the same for all i. The sum of squares
    over the large stream is `energy` times that over the small one, so RMSNorm divides by the same value up to a known
    factor. If copies of scale 1 would leave channels over, one copy is split into four of scale 1/2, which takes three
    more channels. Spare channels (at most three) are zero. With `constant`, one of them has the same value for all
    tokens.
    """

    source: Tensor  # [H] int64, the small channel; 0 at spare channels
    scale: Tensor  # [H] powers of two; 0 at spare channels
    share: Tensor  # [H] add up to 1 over the copies of a channel; 0 at spare channels
    last: Tensor  # [h] the copy that takes the rounding errors of the others
    energy: int
    constant: int | None  # a channel

    def to(self, device: torch.device) -> Stream:
        """Return the stream with its tensors on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("source", "scale", "share", "last")}
        return replace(self, **tensors)

    def write(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [H, n] that write the output of [h, n] to every copy. Exact; zero at spare channels."""
        out = torch.empty(len(self.source), weight.shape[1], dtype=dtype, device=weight.device)
        for start in range(0, len(out), _ROWS):
            rows = slice(start, start + _ROWS)
            out[rows] = weight[self.source[rows]] * self.scale[rows, None].to(weight.dtype)
        return out

    def read(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return columns [n, H] whose product with the copies is that of [n, h] with the originals.

        They are zero at spare channels.
        """
        return self._fit(weight, self.share / self.scale.where(self.scale > 0, 1.0), self.scale, dtype)

    def norm_tied(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm weight [H] before an LM head that is tied to the embedding, and so has its scales."""
        is_copy = (self.scale > 0).to(self.scale.dtype)
        return self._fit(weight[None], is_copy / self.energy, self.scale.square(), dtype)[0]

    def _fit(self, weight: Tensor, nominal: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Solve sum_j gain_j out_j = weight over the copies j of each channel, with out_j close to nominal_j weight.

        The last copy takes the rounding errors of `dtype`. Its value is small, so it rounds finely: with c copies the
        sum is accurate to about 1/c of an ulp, and exact if the products are exact.
        """
        out = torch.empty(len(weight), len(self.source), dtype=dtype, device=weight.device)
        nominal = nominal.to(weight.dtype)
        gain = gain.to(weight.dtype)
        for start in range(0, len(out), _ROWS):
            target = weight[start : start + _ROWS]
            values = (target[:, self.source] * nominal).to(dtype)
            sums = torch.zeros_like(target).index_add_(1, self.source, values.to(weight.dtype) * gain)
            correction = (target - sums) / gain[self.last]
            values[:, self.last] = (values[:, self.last].to(weight.dtype) + correction).to(dtype)
            out[start : start + _ROWS] = values
        return out


def make_stream(small: int, large: int, *, constant: bool) -> Stream:
    """Lay out `small` channels over `large` ones, with a spare channel if there is a constant."""
    energy = large // small
    spare = large - energy * small - constant
    merged = spare < 0 and energy >= 4  # one copy of scale 2 replaces four of scale 1, which frees three channels
    if spare < 0 and not merged:
        energy -= 1
        spare += small
    if energy < 1:
        raise OutriderError(f"hidden {large} is too small for {small} channels{' and a constant' * constant}; raise it")
    scales = []  # of the copies of each channel
    for i in range(small):
        last_copy = [0.5] * 4 if i < spare // 3 else [1.0]
        scales.append([1.0] * (energy - 1) + last_copy)
    if merged:
        scales[0] = [2.0] + [1.0] * (energy - 4)
    source = [i for i, channel_scales in enumerate(scales) for _ in channel_scales]
    zeros = [0.0] * (large - len(source))
    all_scales = [scale for channel_scales in scales for scale in channel_scales]
    ends = torch.tensor([len(channel_scales) for channel_scales in scales]).cumsum(0)
    return Stream(
        source=torch.tensor(source + [0] * len(zeros)),
        scale=torch.tensor(all_scales + zeros, dtype=torch.float64),
        share=torch.tensor(shares(source) + zeros, dtype=torch.float64),
        last=ends - 1,
        energy=energy,
        constant=large - 1 if constant else None,
    )
