"""The weights of a GGUF file, by their names in the `state_dict` of transformers."""

from collections.abc import Collection, Iterator
from functools import partial
from math import prod
from typing import Any

import torch

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.gguf.architectures import architecture_of, num_layers
from outrider.models.loader.gguf.file import ROTARY_FACTORS, GGUFFile
from outrider.models.loader.gguf.schema import FOLDER, Architecture, Source, stacked
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.gguf_made import MadeExperts, MadeWeight
from outrider.models.torch.tensor_files import DTYPES, tensor_values
from outrider.models.torch.weights import Weight, Weights, converted
from outrider.runtime.mapped_files import MappedTensor

_ROTARY = frozenset({ROTARY_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"})
_EMBEDDING, _HEAD = "token_embd.weight", "lm_head.weight"
_FIX = "download or convert it again"


class GGUFWeights(Weights):
    """The weights of a file. A value is made when it is accessed; quantized matrices stay in the blocks of the file."""

    def __init__(
        self,
        file: GGUFFile,
        config: Any,
        dtype: torch.dtype,
        *,
        architecture: Architecture | None = None,
        layers: int | None = None,
    ) -> None:
        """List the weights.

        Args:
            config: the configuration of its model.
            dtype: the type of all weights that are not in quantized blocks.
            architecture: how the file describes them; None: as a model.
            layers: the number of its blocks to list; None: those of the model.

        Raises:
            UnsupportedModel: the file has a tensor that its architecture does not use.
        """
        self._file = file
        self.path = file.path
        self._config = config
        self._architecture = architecture or architecture_of(file)
        self._dtype = dtype
        layers = layers or num_layers(file)
        self._sources = dict(self._architecture.sources(file, layers))
        if _HEAD not in self._sources and _EMBEDDING in file.tensors:
            self._sources[_HEAD] = Source((_EMBEDDING,))
        used = {tensor for source in self._sources.values() for tensor in source.tensors} | _ROTARY
        for name in file.tensors:
            if name not in used and not _is_later(name, layers):
                raise self._unused(name)

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Weight:
        source = self._sources[name]
        values = [self._value(self._file.tensors[tensor]) for tensor in source.tensors]
        if source.experts:
            return self._expert_weight(source, values)
        if source.make is not None:
            return self._made(source, values)
        (value,) = values
        if source.rows is not None:
            order = source.rows(self._config, value.shape[0])
            value = value.reordered(order) if isinstance(value, BlockWeight) else value[order]
        if isinstance(value, BlockWeight):
            return value
        module = name.removesuffix(".weight")
        if self._architecture.norms_plus_one and module != name and module.endswith("norm"):
            plain = module.endswith("linear_attn.norm")
            value = value if plain else value.float() - 1
        return converted(value, self._dtype)

    def check_used(self, names: Collection[str]) -> None:
        """Check that a model with the weights `names` uses all tensors. Raises UnsupportedModel if it does not."""
        spare = tuple(f".{name}.weight" for name in self._architecture.spare)
        used = {tensor for name in names if name in self._sources for tensor in self._sources[name].tensors}
        for name, source in self._sources.items():
            if not used.issuperset(source.tensors) and not (spare and name.endswith(spare)):
                raise self._unused(source.tensors[0])

    def _unused(self, tensor: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._file.path} has tensors that its architecture does not use, such as {tensor}; {FOLDER}"
        )

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight. Raises OutriderError if the file does not have it."""
        if name not in self._sources:
            raise OutriderError(f"{self._file.path} has no tensor {self._architecture.tensor_of(name)}; {_FIX}")
        source = self._sources[name]
        tensors = [self._file.tensors[tensor] for tensor in source.tensors]
        if source.make is None:
            return torch.Size(tensors[0].shape)
        parts = [torch.empty(tensor.shape[source.experts :], device="meta") for tensor in tensors]
        made = source.make(self._config, *parts).shape
        return torch.Size([tensors[0].shape[0], *made]) if source.experts else made

    def nbytes(self, name: str) -> int:
        return sum(self._file.tensors[tensor].data.nbytes for tensor in self._sources[name].tensors)

    @property
    def types(self) -> tuple[str, ...]:
        names = {tensor for source in self._sources.values() for tensor in source.tensors}
        return tuple(sorted({self._file.tensors[name].kind for name in names} - DTYPES.keys()))

    def release(self, name: str) -> None:
        for tensor in self._sources[name].tensors:
            self._file.tensors[tensor].release()

    @property
    def expert_types(self) -> set[str]:
        names = (name for source in self._sources.values() if source.experts for name in source.tensors)
        return {self._file.tensors[name].kind for name in names}

    def _value(self, tensor: MappedTensor) -> torch.Tensor | BlockWeight:
        """Return a tensor. One in blocks has two dimensions: all but the last one are rows."""
        if tensor.kind in DTYPES:
            return tensor_values(tensor)
        blocks = tensor.data.reshape(prod(tensor.shape[:-1]), -1)
        return BlockWeight(blocks, tensor.kind, tensor.shape[-1], release=tensor.release)

    def _expert_weight(self, source: Source, values: list[torch.Tensor | BlockWeight]) -> Weight:
        make = partial(source.make or _only, self._config)
        if any(isinstance(value, BlockWeight) for value in values):
            shapes = [self._file.tensors[tensor].shape for tensor in source.tensors]
            return MadeExperts(values, shapes, make, stacked=source.make is stacked)
        dense = [value for value in values if isinstance(value, torch.Tensor)]
        experts = [make(*parts).to(self._dtype) for parts in zip(*dense, strict=True)]
        return torch.stack(experts)

    def _made(self, source: Source, values: list[torch.Tensor | BlockWeight]) -> Weight:
        make = partial(source.make or _only, self._config)
        dense = [value for value in values if isinstance(value, torch.Tensor)]
        if len(dense) == len(values):
            made = make(*dense)
            return (made.to(self._dtype) if made.is_floating_point() else made).contiguous()
        return MadeWeight(values, [self._file.tensors[tensor].shape for tensor in source.tensors], make)


def _only(_config: Any, value: torch.Tensor) -> torch.Tensor:
    return value


def _is_later(tensor: str, layers: int) -> bool:
    """Return whether a tensor belongs to a block after the first `layers`: it predicts further tokens."""
    block, _, rest = tensor.partition(".")
    number, _, _ = rest.partition(".")
    return block == "blk" and number.isdecimal() and int(number) >= layers
