"""Tensors in safetensors files. The files are mapped into memory: the system reads their pages when they are used."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from outrider.errors import OutriderError
from outrider.models.torch.weights import Weights
from outrider.runtime.mapped_files import INDEX, MappedTensor, map_file, read_index

_WHOLE = "model.safetensors"
_LENGTH_BYTES = 8  # of the number before the header of a file
_FIX = "copy the checkpoint again"
_FLOATS = ("F32", "F16", "BF16")
# Types of tensors whose values torch can hold, by their names in safetensors and GGUF files.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


def tensor_values(tensor: MappedTensor) -> torch.Tensor:
    """Return a tensor of a type in `DTYPES`. It shares the memory of the file if its address fits its type."""
    dtype = DTYPES[tensor.kind]
    if not len(tensor.data):
        return torch.empty(tensor.shape, dtype=dtype)
    data = tensor.data.copy() if tensor.begin % dtype.itemsize else tensor.data
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


class TensorFiles(Weights):
    """The tensors of safetensors files, by their names there and in the types in which they are stored."""

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        """List the tensors.

        Args:
            path: the folder or file, for messages.

        Raises:
            OutriderError: a file is missing or damaged.
        """
        self.path = path
        self._tensors = {name: tensor for file in files for name, tensor in _read(file).items()}

    @classmethod
    def of(cls, folder: Path) -> TensorFiles:
        """List the tensors of a model folder.

        Raises:
            OutriderError: the folder holds no safetensors, or a damaged file.
        """
        files = _weight_files(folder)
        if not files:
            raise OutriderError(f"{folder} holds no .safetensors; write the weights there with save_pretrained")
        return cls(folder, files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises OutriderError if there is none of this name, or torch has no such type."""
        tensor = self._find(name)
        if tensor.kind not in DTYPES:
            raise OutriderError(f"{name} in {self.path} has the type {tensor.kind}, which is not supported; {_FIX}")
        return tensor_values(tensor)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor. An OutriderError says that there is none of this name."""
        return torch.Size(self._find(name).shape)

    def kind(self, name: str) -> str:
        """Return the type of a tensor as safetensors names it, such as BF16. Errors are those of `shape`."""
        return self._find(name).kind

    def is_float(self, name: str) -> bool:
        """Return whether a tensor has float values of at least 16 bits. Errors are those of `shape`."""
        return self.kind(name) in _FLOATS

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor. Errors are those of `shape`."""
        return self._find(name).data.nbytes

    def release(self, name: str) -> None:
        self._find(name).release()

    def _find(self, name: str) -> MappedTensor:
        if name not in self._tensors:
            raise OutriderError(f"the weights in {self.path} lack {name}; {_FIX}")
        return self._tensors[name]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with weights, in the order in which transformers looks for them."""
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if (folder / INDEX).is_file():  # other files may hold the weights in another layout
        return [folder / name for name in sorted(set(read_index(folder / INDEX).values()))]
    return sorted(folder.glob("*.safetensors"))


def _read(path: Path) -> dict[str, MappedTensor]:
    """Return the tensors of a file, from its header."""
    try:
        data = map_file(path)
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:start])
        header.pop("__metadata__", None)
        return {name: _mapped(name, entry, data, start) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise OutriderError(f"{path} cannot be read ({error}); {_FIX}") from error


def _mapped(name: str, entry: Mapping[str, Any], data: mmap.mmap, start: int) -> MappedTensor:
    """Return a tensor. A ValueError says that it has another size than its shape."""
    begin, end = (start + offset for offset in entry["data_offsets"])
    kind, shape = str(entry["dtype"]), tuple(entry["shape"])
    size = end - begin
    if size < 0 or (kind in DTYPES and size != prod(shape) * DTYPES[kind].itemsize):
        raise ValueError(f"{name} has {size} bytes and the shape {shape}")
    values = np.frombuffer(data, np.uint8, size, begin) if size else np.empty(0, np.uint8)
    return MappedTensor(name=name, kind=kind, shape=shape, data=values, file=data, begin=begin)
