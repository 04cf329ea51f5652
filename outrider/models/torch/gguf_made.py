"""Weights that are made of matrices in the quantized blocks of a GGUF file when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from outrider.models.torch.gguf_linear import BlockWeight

Part = torch.Tensor | BlockWeight
Make = Callable[..., torch.Tensor]


def _dense(part: Part, rows: Any = slice(None)) -> torch.Tensor:
    return part.dequantize(rows) if isinstance(part, BlockWeight) else part.float()


def _kinds(parts: Sequence[Part]) -> str:
    """Return the types of the parts that are in blocks, joined by +."""
    return "+".join(sorted({part.kind for part in parts if isinstance(part, BlockWeight)}))


class MadeWeight:
    """A matrix that is a function of others, such as one with other columns. It is dequantized when it is used."""

    def __init__(self, parts: Sequence[Part], shapes: Sequence[Sequence[int]], make: Make) -> None:
        """Refer to `parts`, some of them in blocks.

        Args:
            parts: the matrices.
            shapes: their shapes. Matrices in blocks have all but the last dimension as rows.
            make: returns the matrix from the dequantized parts.
        """
        self.parts = tuple(parts)
        self.kind = _kinds(parts)
        self._shapes = tuple(map(tuple, shapes))
        self._make = make
        self.shape = make(*(torch.empty(shape, device="meta") for shape in self._shapes)).shape

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def release(self) -> None:
        """Free the memory of the parts, which are read from the file again when they are used."""
        for part in self.parts:
            if isinstance(part, BlockWeight):
                part.release()

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return rows of the matrix in float32, exactly."""
        dense = [_dense(part).view(shape) for part, shape in zip(self.parts, self._shapes, strict=True)]
        return self._make(*dense)[rows]


class ExpertWeight(MadeWeight):
    """The matrices [E, ...] of all experts of a layer. Each is made of one matrix of every part [E, ...]."""

    def __init__(
        self, parts: Sequence[Part], shapes: Sequence[Sequence[int]], make: Make, *, stacked: bool = False
    ) -> None:
        """Refer to `parts`.

        Args:
            parts: as in `MadeWeight`.
            shapes: the same.
            make: returns the matrix of an expert from its dequantized parts.
            stacked: whether `make` puts the parts one above the other.
        """
        super().__init__(parts, [shape[1:] for shape in shapes], make)
        self.stacked = stacked
        self.experts = int(shapes[0][0])
        self.shape = torch.Size([self.experts, *self.shape])

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return the matrices of experts in float32, exactly."""
        return torch.stack([self.expert(i) for i in range(self.experts)[rows]])

    def expert(self, number: int) -> torch.Tensor:
        """Return the matrix of one expert in float32, exactly."""
        dense = []
        for part, (rows, *rest) in zip(self.parts, self._shapes, strict=True):
            if isinstance(part, BlockWeight):
                dense.append(_dense(part, slice(number * rows, (number + 1) * rows)).view(rows, *rest))
            else:
                dense.append(part[number].float())
        return self._make(*dense)


class BlockExperts(nn.Module):
    """Takes the place of a parameter with all experts of a layer: an expert is dequantized when it is used."""

    def __init__(self, blocks: ExpertWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.shape = blocks.shape

    def __getitem__(self, expert: Any) -> torch.Tensor:
        weight = self.blocks.expert(int(expert)).to(self.dtype)
        self.blocks.release()
        return weight


class DenseInputExperts(nn.Module):
    """The experts of Llama 4, with a row of inputs for each token and expert: zeros where it is not chosen."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.act_fn = experts.act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inputs = hidden.view(self.gate_up_proj.shape[0], -1, hidden.shape[-1])
        out = torch.zeros_like(inputs)
        for expert, rows in enumerate(inputs):
            chosen = rows.any(-1)
            if chosen.any():
                gate, up = (rows[chosen] @ self.gate_up_proj[expert]).chunk(2, -1)
                out[expert, chosen] = (up * self.act_fn(gate)) @ self.down_proj[expert]
        return out.view(-1, hidden.shape[-1])
