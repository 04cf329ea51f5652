"""Modules whose weights stay in the quantized blocks of a GGUF file. They are dequantized when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from outrider.errors import OutriderError

_VALUES = 1 << 20  # values that are dequantized at a time


def _gguf() -> Any:
    """Return the package gguf, which dequantizes blocks."""
    try:
        import gguf
    except ImportError as error:
        raise OutriderError('quantized GGUF files need the package gguf; run pip install "outrider[gguf]"') from error
    return gguf


class Blocks(Protocol):
    """A matrix [rows, columns] that is dequantized when it is used."""

    kind: str  # of the blocks; several types are joined by +
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix where it is stored."""
        ...

    def release(self) -> None:
        """Free the memory of the blocks, which are read from the file again when they are used."""
        ...

    def dequantize(self, rows: Any = ...) -> torch.Tensor:
        """Return rows of the matrix in float32, exactly."""
        ...


class BlockWeight:
    """A matrix [rows, columns] in the blocks of a GGUF file.

    Blocks lie along a row, so rows can be selected and reordered without dequantization.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        kind: str,
        columns: int,
        *,
        order: NDArray[np.int64] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Refer to `data` [rows, bytes per row] of the type `kind`, such as "Q4_K".

        Args:
            kind: their type.
            columns: values of a row.
            order: [rows] the row of `data` of each row; None: the same.
            release: frees the memory of `data`, which is read from the file again when it is used.
        """
        self.data = data
        self.kind = kind
        self.shape = torch.Size((len(data), columns))
        self.release = release
        self._rows = np.arange(len(data)) if order is None else order

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self) -> NDArray[np.uint8]:
        """Return the blocks [rows, bytes per row]."""
        return self.data[self._rows]

    def addresses(self) -> NDArray[np.uint64]:
        """Return the address of each row. The matrix must outlive it."""
        return (self.data.ctypes.data + self._rows * self.data.strides[0]).astype(np.uint64)

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return rows of the matrix in float32, exactly."""
        if _dequantizer is not None:
            values = _dequantizer(self.kind, self.addresses()[rows], self.shape[1])
            if values is not None:
                return values
        gguf = _gguf()
        dense = gguf.dequantize(self.data[self._rows[rows]], gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32))

    def reordered(self, order: torch.Tensor) -> BlockWeight:
        """Return a matrix with the rows in another order [rows]. It shares the blocks."""
        rows = self._rows[order.numpy()]
        return BlockWeight(self.data, self.kind, self.shape[1], order=rows, release=self.release)


class DenseWeight:
    """A dense matrix [rows, columns] whose rows are converted to float32 when they are used."""

    kind = ""

    def __init__(self, values: torch.Tensor, *, release: Callable[[], None]) -> None:
        """Refer to a matrix. `release` frees its memory until it is used again."""
        self.values = values
        self.shape = values.shape
        self.nbytes = values.nbytes
        self.release = release

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        return self.values[rows].float()


Dequantizer = Callable[[str, NDArray[np.uint64], int], torch.Tensor | None]
_dequantizer: Dequantizer | None = None


def use_dequantizer(dequantizer: Dequantizer | None) -> None:
    """Let all matrices be dequantized by a function of the type, the addresses of the rows, and the columns.

    It returns None for types that it does not know. Without a function, the package gguf dequantizes.
    """
    global _dequantizer
    _dequantizer = dequantizer


class BlockLinear(nn.Module):
    """A linear layer with a weight in blocks."""

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """A dequantized copy [out, in]."""
        return self.blocks.dequantize().to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A part of the rows is dequantized at a time: an LM head may have more values than fit into the memory.
        rows, columns = self.blocks.shape
        size = max(_VALUES // columns, 1) if isinstance(self.blocks, BlockWeight | DenseWeight) else rows
        # Outputs that stay between freed parts would keep the allocator from using their memory again.
        out = x.new_empty(*x.shape[:-1], rows)
        for begin in range(0, rows, size):
            part = slice(begin, begin + size)
            out[..., part] = functional.linear(x, self.blocks.dequantize(part).to(self.dtype))
        self.blocks.release()
        return out if self.bias is None else out + self.bias


class BlockEmbedding(nn.Module):
    """An embedding table in blocks."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.scale = scale
        self.num_embeddings, self.embedding_dim = blocks.shape

    @property
    def weight(self) -> torch.Tensor:
        """A dequantized copy [V, H]."""
        return self.blocks.dequantize().to(self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.blocks.dequantize(ids.reshape(-1).cpu().numpy())
        return rows.to(self.dtype).view(*ids.shape, -1) * self.scale


def expand_blocks(model: nn.Module) -> None:
    """Replace modules with weights in blocks by dense ones, to train or save the model. Tied weights stay tied."""
    weights: dict[Blocks, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, BlockLinear | BlockEmbedding):
            continue
        outputs, inputs = module.blocks.shape
        dense: nn.Module
        if isinstance(module, BlockLinear):
            dense = nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")
            dense._parameters["bias"] = module.bias
        else:
            dense = nn.Embedding(outputs, inputs, device="meta")
        if module.blocks not in weights:
            weights[module.blocks] = nn.Parameter(module.weight, requires_grad=False)
        dense._parameters["weight"] = weights[module.blocks]
        model.set_submodule(name, dense)
