"""Open a checkpoint for the native kernels: they read its weights from the mapped files, without transformers."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from outrider.models.loader.folder import INDEX
from outrider.models.loader.mapped_tensor import MappedTensor
from outrider.models.loader.model_config import ModelConfig
from outrider.models.native.support import FAMILIES
from outrider.models.torch.weights import Weights, converted

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_WHOLE = "model.safetensors"
_LENGTH_BYTES = 8  # of the number before the header of a safetensors file


class FolderWeights(Weights):
    """The weights in the safetensors of a model folder, which are mapped into memory."""

    def __init__(self, path: Path, tensors: Mapping[str, MappedTensor], dtype: torch.dtype) -> None:
        """Refer to tensors of a folder, by their names in transformers. Values have the type `dtype`."""
        self.path = path
        self._tensors = tensors
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        value = torch.frombuffer(tensor.data, dtype=_DTYPES[tensor.kind]).view(tensor.shape)
        return converted(value, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._tensors[name].shape)

    def release(self, name: str) -> None:
        self._tensors[name].release()


def open_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> FolderWeights | None:
    """Map the weights of a folder.

    Returns:
        The weights; None if a file is damaged, or a tensor is missing, or has another shape or type than expected.
        Then transformers reads the folder, or says what is wrong with it.
    """
    try:
        tensors = {name: tensor for file in _files(folder) for name, tensor in _read(file).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if config.tie_word_embeddings and EMBEDDING in tensors:
        if HEAD in tensors and not np.array_equal(tensors[HEAD].data, tensors[EMBEDDING].data):
            return None
        tensors[HEAD] = tensors[EMBEDDING]
    expected = weight_shapes(config)
    found = {name: tensor for name, tensor in tensors.items() if name in expected and tensor.kind in _DTYPES}
    if len(found) < len(expected) or any(found[name].shape != shape for name, shape in expected.items()):
        return None
    return FolderWeights(folder, {name: found[name] for name in expected}, dtype)


def _files(folder: Path) -> list[Path]:
    """Return the files with weights, in the order in which transformers looks for them."""
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    index = json.loads((folder / INDEX).read_text("utf-8"))
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _read(path: Path) -> dict[str, MappedTensor]:
    """Return the tensors of a safetensors file, from its header."""
    with path.open("rb") as content:
        # Private and writable, since torch warns of memory that is not writable. Nothing writes to it.
        data = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    return {name: _mapped(name, entry, data, start) for name, entry in header.items()}


def _mapped(name: str, entry: Mapping[str, Any], data: mmap.mmap, start: int) -> MappedTensor:
    """Return a tensor. A ValueError says that it has another size than its shape, or no aligned address."""
    begin, end = (start + offset for offset in entry["data_offsets"])
    kind, shape = str(entry["dtype"]), tuple(entry["shape"])
    if kind in _DTYPES and (begin % _DTYPES[kind].itemsize or end - begin != prod(shape) * _DTYPES[kind].itemsize):
        raise ValueError(f"{name} has {end - begin} bytes at {begin}")
    values = np.frombuffer(data, np.uint8, end - begin, begin)
    return MappedTensor(name=name, kind=kind, shape=shape, data=values, file=data, begin=begin)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model, by its name in the `state_dict` of transformers."""
    family = FAMILIES[config.model_type]
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    rows = (queries, keys, keys) if len(family.attention) > 1 else (queries + 2 * keys,)
    layer: dict[str, tuple[int, ...]] = {}
    for part, size in zip(family.attention, rows, strict=True):
        layer[f"{part}.weight"] = (size, hidden)
        if config.model_type == "qwen2" or getattr(config, "attention_bias", False):
            layer[f"{part}.bias"] = (size,)
    layer["self_attn.o_proj.weight"] = (hidden, queries)
    if getattr(config, "attention_bias", False):
        layer["self_attn.o_proj.bias"] = (hidden,)
    for part in family.mlp:
        layer[f"{part}.weight"] = (2 * config.intermediate_size // len(family.mlp), hidden)
    layer["mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    norms = (family.attention_norm, family.attention_post_norm, family.mlp_norm, family.mlp_post_norm)
    layer |= {f"{norm}.weight": (hidden,) for norm in norms if norm is not None}
    if family.head_norms:
        layer["self_attn.q_norm.weight"] = (queries if family.wide_norms else config.head_dim,)
        layer["self_attn.k_norm.weight"] = (keys if family.wide_norms else config.head_dim,)
    table = (config.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, "model.norm.weight": (hidden,), HEAD: table}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes
