"""The training data of generators and scorers."""

from typing import NamedTuple

from torch import Tensor


class Clips(NamedTuple):
    """Latents of whole outputs, and their captions."""

    latents: Tensor  # (clips, frames, channels, rows, columns), float16, mean 0 and deviation 1
    tokens: Tensor  # (clips, words)
