"""Weights that are made of matrices in a file, most of them in quantized blocks, when they are used."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class ExpertRows(NamedTuple):
    """The matrices of all experts of a layer, as the native kernels read them."""

    parts: Sequence[Part]  # [rows, inputs] each
    order: torch.Tensor  # [E, outputs] the row of each output of each expert, with the parts one above the other


class ExpertWeight:
    """The matrices [E, ...] of all experts of a layer. Each is made when it is used."""

    kind: str  # of those in blocks; several types are joined by +
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices where they are stored."""
        raise NotImplementedError

    def expert(self, number: int) -> torch.Tensor:
        """Return the matrix of one expert in float32, exactly."""
        raise NotImplementedError

    def rows(self) -> ExpertRows | None:
        """Return the matrices that the experts consist of, one above the other; None: they are made otherwise."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the memory of the experts, which are read from the file again when they are used."""
        raise NotImplementedError

    def release_expert(self, number: int) -> None:
        """Free the memory of one expert at least."""
        self.release()

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return the matrices of experts in float32, exactly."""
        return torch.stack(list(map(self.expert, range(self.shape[0])[rows])))


class MadeExperts(ExpertWeight, MadeWeight):
    """Experts that are made of one matrix of every part [E, ...]."""

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
        MadeWeight.__init__(self, parts, [shape[1:] for shape in shapes], make)
        self._stacked = stacked
        self.shape = torch.Size([int(shapes[0][0]), *self.shape])

    nbytes = MadeWeight.nbytes
    release = MadeWeight.release

    def expert(self, number: int) -> torch.Tensor:
        dense = []
        for part, (rows, *rest) in zip(self.parts, self._shapes, strict=True):
            if isinstance(part, BlockWeight):
                dense.append(_dense(part, slice(number * rows, (number + 1) * rows)).view(rows, *rest))
            else:
                dense.append(part[number].float())
        return self._make(*dense)

    def rows(self) -> ExpertRows | None:
        if not self._stacked:
            return None
        parts = [part if isinstance(part, BlockWeight) else part.flatten(0, 1) for part in self.parts]
        orders = []
        first = 0
        for part in parts:
            count = int(part.shape[0])
            orders.append(torch.arange(first, first + count).view(self.shape[0], -1))
            first += count
        return ExpertRows(parts, torch.cat(orders, 1))


class SeparateExperts(ExpertWeight):
    """Experts that are stored each by itself, in one matrix or in several, one above the other."""

    def __init__(self, experts: Sequence[Sequence[Part]], release: Callable[[int], None]) -> None:
        """Refer to the matrices [E][parts] of all experts. `release` frees those of one expert."""
        self._experts = experts
        self._release = release
        self.kind = _kinds([part for parts in experts for part in parts])
        outputs = sum(int(part.shape[0]) for part in experts[0])
        self.shape = torch.Size([len(experts), outputs, int(experts[0][0].shape[1])])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._experts for part in parts)

    def expert(self, number: int) -> torch.Tensor:
        return torch.cat(list(map(_dense, self._experts[number])))

    def rows(self) -> ExpertRows | None:
        parts = [part for parts in self._experts for part in parts]
        return ExpertRows(parts, torch.arange(self.shape[0] * self.shape[1]).view(self.shape[:2]))

    def release(self) -> None:
        for i in range(len(self._experts)):
            self._release(i)

    def release_expert(self, number: int) -> None:
        self._release(number)


class BlockExperts(nn.Module):
    """Takes the place of a parameter with all experts of a layer: an expert is dequantized when it is used."""

    def __init__(self, blocks: ExpertWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.shape = blocks.shape

    def __getitem__(self, expert: Any) -> torch.Tensor:
        number = int(expert)
        weight = self.blocks.expert(number).to(self.dtype)
        self.blocks.release_expert(number)
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
