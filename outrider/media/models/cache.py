"""The KV cache of the past blocks of an output."""

import torch
from torch import Tensor


class BlockCache:
    """Keys and values of the caption and of the last clean blocks, for each layer.

    A pass reads it. Only a commit writes to it, a whole block at a time. The keys and values of all
    layers are in one tensor, so a commit joins them in two operations.

    Args:
        text: keys and values of the caption for each layer, each of shape (heads, tokens, channels of a head).
        window: how many past blocks are kept.
    """

    def __init__(self, text: list[tuple[Tensor, Tensor]], window: int) -> None:
        self.committed = 0  # blocks so far
        self._text = _stack(text)
        self._window = window
        self._blocks: list[Tensor] = []
        self._joined = self._text

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the caption and the past blocks, each (heads, tokens, channels of a head)."""
        return self._joined[2 * layer], self._joined[2 * layer + 1]

    def append(self, block: list[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values of a clean block, for each layer."""
        self._blocks = [*self._blocks, _stack(block)][-self._window :]
        self.committed += 1
        self._joined = torch.cat([self._text, *self._blocks], dim=-2)

    def blocks(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the keys and values of the blocks in the window, oldest first, for each layer."""
        return [list(zip(block[::2], block[1::2], strict=True)) for block in self._blocks]


def _stack(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return keys and values of all layers in turns, (2 x layers, heads, tokens, channels of a head)."""
    return torch.stack([part for pair in layers for part in pair])
