"""The KV cache of the past blocks of an output."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockCache:
    """Keys and values of the caption and of the last clean blocks, for each layer.

    A pass reads it. Only a commit writes to it, a whole block at a time.

    Args:
        text: keys and values of the caption for each layer, each of shape (heads, tokens, channels of a head).
        window: how many past blocks are kept.
    """

    def __init__(self, text: list[tuple[Tensor, Tensor]], window: int) -> None:
        self.committed = 0  # blocks so far
        self._text = text
        self._window = window
        self._blocks: list[list[tuple[Tensor, Tensor]]] = []
        self._joined = text

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the caption and the past blocks, each (heads, tokens, channels of a head)."""
        return self._joined[layer]

    def append(self, block: list[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values of a clean block, for each layer."""
        self._blocks = [*self._blocks, block][-self._window :]
        self.committed += 1
        self._joined = [self._join(layer) for layer in range(len(self._text))]

    def blocks(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the keys and values of the blocks in the window, oldest first, for each layer."""
        return self._blocks

    def _join(self, layer: int) -> tuple[Tensor, Tensor]:
        parts = [self._text[layer], *(block[layer] for block in self._blocks)]
        keys = torch.cat([key for key, _ in parts], dim=1)
        values = torch.cat([value for _, value in parts], dim=1)
        return keys, values
