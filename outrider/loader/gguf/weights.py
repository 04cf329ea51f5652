"""The weights of a GGUF file, by their names in the `state_dict` of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from outrider.errors import OutriderError, UnsupportedModel
from outrider.loader.gguf.architectures import Architecture, architecture_of
from outrider.loader.gguf.file import ROTARY_FACTORS, GGUFFile
from outrider.loader.mapped_tensor import MappedTensor
from outrider.models.gguf_linear import BlockWeight
from outrider.models.weights import Weight, Weights

_FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_ROTARY = (ROTARY_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
_TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FIX = "download or convert it again"


class GGUFWeights(Weights):
    """The weights of a file. A value is made when it is accessed; quantized matrices stay in the blocks of the file."""

    def __init__(self, file: GGUFFile, config: Any, dtype: torch.dtype) -> None:
        """List the weights.

        Args:
            file: the file.
            config: the configuration of its model.
            dtype: the type of all weights that are not in quantized blocks.

        Raises:
            UnsupportedModel: the file has a tensor that its architecture does not use.
        """
        self._file = file
        self.path = file.path
        self._architecture = architecture_of(file)
        self._dtype = dtype
        self._heads = (config.num_attention_heads, config.num_key_value_heads)
        modules = {tensor: module for module, tensor in self._architecture.layer.items()}
        self._tensors: dict[str, MappedTensor] = {}
        for tensor in file.tensors.values():
            if tensor.name not in _ROTARY:
                self._tensors[_state_name(file, tensor.name, modules)] = tensor
        if _HEAD not in self._tensors and _EMBEDDING in self._tensors:
            self._tensors[_HEAD] = self._tensors[_EMBEDDING]

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Weight:
        tensor = self._tensors[name]
        module, _, _ = name.rpartition(".")
        if tensor.kind in _FLOATS:
            value = torch.frombuffer(tensor.data, dtype=_FLOATS[tensor.kind]).view(tensor.shape)
            if self._architecture.norms_plus_one and module.endswith("norm"):
                value = value.float() - 1
            return self._ordered(module, value.to(self._dtype))
        blocks = tensor.data.reshape(tensor.shape[0], -1)
        return self._ordered(module, BlockWeight(blocks, tensor.kind, tensor.shape[-1], release=tensor.release))

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight.

        Raises:
            OutriderError: the file does not have it.
        """
        if name not in self._tensors:
            raise OutriderError(f"{self._file.path} has no tensor {_tensor_name(self._architecture, name)}; {_FIX}")
        return torch.Size(self._tensors[name].shape)

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.kind for tensor in self._tensors.values()} - _FLOATS.keys()))

    def release(self, name: str) -> None:
        self._tensors[name].release()

    def _ordered(self, module: str, value: Weight) -> Weight:
        """Return a weight with its rows as transformers orders them."""
        part = module.rpartition(".")[2]
        if not self._architecture.permuted or part not in ("q_proj", "k_proj"):
            return value
        order = _rotary_order(value.shape[0], self._heads[part == "k_proj"])
        return value.reordered(order) if isinstance(value, BlockWeight) else value[order]


def _state_name(file: GGUFFile, tensor: str, modules: Mapping[str, str]) -> str:
    """Return the name in transformers of a tensor, such as blk.0.attn_q.weight."""
    stem, _, suffix = tensor.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block, _, part = stem.partition(".")
    number, _, part = part.partition(".")
    if block != "blk" or part not in modules:
        raise UnsupportedModel(
            f"{file.path} has tensors that its architecture does not use, such as {tensor};"
            " use the folder of the Hugging Face model"
        )
    return f"model.layers.{number}.{modules[part]}.{suffix}"


def _tensor_name(architecture: Architecture, name: str) -> str:
    """Return the name of the tensor of a weight of transformers."""
    module, _, suffix = name.rpartition(".")
    for stem, top in _TOP.items():
        if module == top:
            return f"{stem}.{suffix}"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{architecture.layer[part]}.{suffix}"


def _rotary_order(rows: int, heads: int) -> torch.Tensor:
    """Return the row in a GGUF file of each row of q or k in transformers, which has halves instead of pairs."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
