"""The tensors in the safetensors of a folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import OutriderError
from outrider.models.loader.folder import INDEX

_FIX = "copy the checkpoint again"
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}  # bytes; others are in the name


class TensorFiles:
    """The tensors of a folder by name. The files are mapped, and a tensor is read when it is used."""

    def __init__(self, folder: Path) -> None:
        """List the tensors.

        Raises:
            OutriderError: the folder holds no safetensors, or a damaged one.
        """
        self.folder = folder
        self._stack = ExitStack()
        self._file: dict[str, Any] = {}
        for path in _paths(folder):
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise OutriderError(f"{path} cannot be read ({error}); {_FIX}") from error
            self._file |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            OutriderError: there is none of this name.
        """
        tensor: torch.Tensor = self._of(name).get_tensor(name)
        return tensor

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, without reading it. Errors are those of `read`."""
        return torch.Size(self._of(name).get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """Return the type of a tensor as safetensors names it, such as BF16. Errors are those of `read`."""
        return str(self._of(name).get_slice(name).get_dtype())

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return prod(self.shape(name)) * _item_bytes(self.kind(name))

    def _of(self, name: str) -> Any:
        """Return the file with a tensor."""
        if name not in self._file:
            raise OutriderError(f"the weights in {self.folder} lack {name}; {_FIX}")
        return self._file[name]


def _paths(folder: Path) -> list[Path]:
    """Return the files of a folder that its index names: others may hold the weights in another layout."""
    try:
        index = json.loads((folder / INDEX).read_text("utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        single = folder / "model.safetensors"
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    except (ValueError, LookupError) as error:
        raise OutriderError(f"{folder / INDEX} cannot be read ({error}); {_FIX}") from error
    if not paths:
        raise OutriderError(f"{folder} holds no .safetensors; write the weights there with save_pretrained")
    return paths


def _item_bytes(kind: str) -> int:
    """Return the bytes of an element of a type of safetensors, such as F16 or F8_E4M3."""
    return _SIZES.get(kind, 2 if kind.endswith("16") else 1)
