"""Modules whose weights stay in the quantized blocks of a GGUF file. They are dequantized when they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from outrider.errors import OutriderError


def _gguf() -> Any:
    """Return the package gguf, which dequantizes blocks."""
    try:
        import gguf
    except ImportError as error:
        raise OutriderError('quantized GGUF files need the package gguf; run pip install "outrider[gguf]"') from error
    return gguf


class BlockWeight:
    """A matrix [rows, columns] in the blocks of a GGUF file.

    Blocks lie along a row, so rows can be selected and reordered without dequantization.
    """

    def __init__(self, data: NDArray[np.uint8], kind: str, columns: int) -> None:
        """Keep `data` [rows, bytes per row] of the type `kind`, such as "Q4_K"."""
        self.data = data
        self.kind = kind
        self.shape = torch.Size((len(data), columns))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, rows: Any = slice(None)) -> torch.Tensor:
        """Return rows of the matrix in float32, exactly."""
        gguf = _gguf()
        values = gguf.dequantize(np.ascontiguousarray(self.data[rows]), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    def reordered(self, order: torch.Tensor) -> BlockWeight:
        """Return a copy with the rows in another order [rows]."""
        return BlockWeight(self.data[order.numpy()], self.kind, self.shape[1])


def block_types(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the GGUF types of a model's weights in blocks, sorted."""
    modules = (module for module in model.modules() if isinstance(module, BlockLinear | BlockEmbedding))
    return tuple(sorted({module.blocks.kind for module in modules}))


class BlockLinear(nn.Module):
    """A linear layer with a weight in blocks."""

    def __init__(self, blocks: BlockWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """A dequantized copy [out, in]."""
        return self.blocks.dequantize().to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class BlockEmbedding(nn.Module):
    """An embedding table in blocks."""

    def __init__(self, blocks: BlockWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = blocks.shape

    @property
    def weight(self) -> torch.Tensor:
        """A dequantized copy [V, H]."""
        return self.blocks.dequantize().to(self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.blocks.dequantize(ids.reshape(-1).cpu().numpy())
        return rows.to(self.dtype).view(*ids.shape, -1)


def expand_blocks(model: nn.Module) -> None:
    """Replace modules with weights in blocks by dense ones, to train or save the model. Tied weights stay tied."""
    weights: dict[BlockWeight, nn.Parameter] = {}
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
