"""Which small index each large one copies, and the shares with which copies add up to the original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import OutriderError

_ROWS = 2048  # a matrix is filled so many rows at a time, to keep what is held in full precision small


def shares(source: Sequence[int]) -> list[float]:
    """A power of two for each copy, such that those of one source add up to 1; the smallest come last.

    Multiplying by a power of two is exact in every floating-point type, and so is the sum of what was divided.
    """
    copies, seen = Counter(source), Counter[int]()
    found = []
    for index in source:
        depth = copies[index].bit_length() - 1
        whole = (2 << depth) - copies[index]  # copies that need not be halved once more
        found.append(0.5 ** (depth + (seen[index] >= whole)))
        seen[index] += 1
    return found


def spread(count: int, copies: int) -> list[int]:
    """`count` sources over `copies` places, evenly, copies of one source side by side."""
    return [place * count // copies for place in range(copies)]


def divide(weight: Tensor, source: Sequence[int]) -> Tensor:
    """Columns [n, copies] that together do what [n, sources] does where copies of one source carry the same."""
    return weight[:, list(source)] * weight.new_tensor(shares(source))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A residual stream of h channels, laid out over H.

    Channel i is copied with scales s whose squares add up to `energy`, the same for all i. The sum of squares over the
    large stream is `energy` times that over the small one, so RMSNorm divides by the same up to a known factor. Where
    copies of scale 1 alone would leave channels over, one copy is split into four of scale 1/2, which takes three.
    Spare channels (at most three) hold zero, or with `constant` one of them holds the same number for all tokens.
    """

    source: Tensor  # [H] int64; 0 at spare channels, where scale is 0
    scale: Tensor  # [H] powers of two; 0 at spare channels
    share: Tensor  # [H] of one channel they add up to 1; 0 at spare channels
    last: Tensor  # [h] the copy that takes what rounding left of the others
    energy: int
    constant: int | None  # channel

    def write(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [H, n] that write what [h, n] writes to every copy; exact, and zero for spare channels."""
        out = torch.empty(len(self.source), weight.shape[1], dtype=dtype)
        for rows in range(0, len(out), _ROWS):
            part = slice(rows, rows + _ROWS)
            out[part] = weight[self.source[part]] * self.scale[part, None].to(weight.dtype)
        return out

    def read(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Columns [n, H] that read from all copies what [n, h] reads from the originals; zero for spare channels."""
        return self._fit(weight, self.share / self.scale.where(self.scale > 0, 1.0), self.scale, dtype)

    def norm_tied(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm [H] in front of a head that reads with the scales that the embedding writes with."""
        live = (self.scale > 0).to(self.scale.dtype)
        return self._fit(weight[None], live / self.energy, self.scale.square(), dtype)[0]

    def _fit(self, weight: Tensor, nominal: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Solve sum_j gain_j out_j = weight over the copies j of each channel, out_j close to nominal_j weight.

        Rounding to `dtype` goes into the last copy, whose part is small and so rounds finely: with c copies the sum
        is right to about 1/c of an ulp, and right altogether where the products are exact.
        """
        out = torch.empty(len(weight), len(self.source), dtype=dtype)
        nominal, gain = nominal.to(weight.dtype), gain.to(weight.dtype)
        for rows in range(0, len(out), _ROWS):
            wanted = weight[rows : rows + _ROWS]
            part = (wanted[:, self.source] * nominal).to(dtype)
            got = torch.zeros_like(wanted).index_add_(1, self.source, part.to(weight.dtype) * gain)
            rest = (wanted - got) / gain[self.last]
            part[:, self.last] = (part[:, self.last].to(weight.dtype) + rest).to(dtype)
            out[rows : rows + _ROWS] = part
        return out


def make_stream(small: int, large: int, *, constant: bool) -> Stream:
    """Lay `small` channels out over `large`, with a spare one if there has to be a constant."""
    energy = large // small
    room = large - energy * small - constant
    merged = room < 0 and energy >= 4  # four copies of scale 1 make one of scale 2, which frees three channels
    if room < 0 and not merged:
        energy, room = energy - 1, room + small
    if energy < 1:
        raise OutriderError(f"hidden {large} is too small for {small} channels{' and a constant' * constant}; raise it")
    scales = [[1.0] * (energy - 1) + ([0.5] * 4 if i < room // 3 else [1.0]) for i in range(small)]
    if merged:
        scales[0] = [2.0] + [1.0] * (energy - 4)
    source = [i for i, own in enumerate(scales) for _ in own]
    spare = [0.0] * (large - len(source))
    ends = torch.tensor([len(own) for own in scales]).cumsum(0)
    return Stream(
        source=torch.tensor(source + [0] * len(spare)),
        scale=torch.tensor([scale for own in scales for scale in own] + spare, dtype=torch.float64),
        share=torch.tensor(shares(source) + spare, dtype=torch.float64),
        last=ends - 1,
        energy=energy,
        constant=large - 1 if constant else None,
    )
