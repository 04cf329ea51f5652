"""The weights of a model folder for the native kernels, which read them from the mapped files, without transformers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from outrider.errors import UnsupportedModel
from outrider.models.loader.model_config import ModelConfig, body_of
from outrider.models.loader.quantized.weights import QuantizedWeights, quantization_of
from outrider.models.loader.weight_shapes import weight_shapes
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.gguf_made import SeparateExperts
from outrider.models.torch.group_weight import GroupWeight, can_join
from outrider.models.torch.tensor_files import TensorFiles
from outrider.models.torch.weights import Weight, Weights, converted
from outrider.runtime.grouping import instances

_TABLES = ("embed_tokens.weight", "lm_head.weight")
# Names that a part of a multimodal model may have in its files, beside that in transformers.
_OLDER_BODIES = ("language_model.model", "model")
_OLDER_HEAD = "language_model.lm_head.weight"
_BLOCKS = ("mlp", "block_sparse_moe")  # names of an MLP with experts
# The matrices of one expert, one above the other, by the name of the weight of all experts.
_EXPERT_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class _Source(NamedTuple):
    """Where a weight is in the files."""

    names: tuple[tuple[str, ...], ...]  # [experts][parts]; one name: it is stored as one tensor
    transposed: bool = False  # whether the last two dimensions are exchanged

    @property
    def whole(self) -> str | None:
        """The name of a weight that is stored as one tensor."""
        return self.names[0][0] if len(self.names) == 1 == len(self.names[0]) else None


class FolderWeights(Weights):
    """The weights of a folder, by their names in transformers."""

    def __init__(self, stored: Weights, sources: Mapping[str, _Source], body: str, dtype: torch.dtype) -> None:
        """Refer to weights as they are stored.

        Args:
            stored: the weights, by their names in the files.
            sources: where each weight is.
            body: the module with the decoder layers.
            dtype: the type of the model. Dense weights beside quantized blocks are float32, except for tables.
        """
        self.path = stored.path
        self.body = body
        self._stored = stored
        self._sources = sources
        self._table_dtype = dtype
        self._dtype = torch.float32 if stored.types else dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Weight:
        source = self._sources[name]
        if source.whole is None:
            experts = [list(map(self._part, parts)) for parts in source.names]
            return SeparateExperts(experts, partial(self._release_expert, source))
        value = self._stored[source.whole]
        if not isinstance(value, torch.Tensor):
            return value
        value = value.transpose(1, 2) if source.transposed else value
        return converted(value, self._table_dtype if name.endswith(_TABLES) else self._dtype)

    def _part(self, name: str) -> torch.Tensor | BlockWeight:
        value = self._stored[name]
        assert isinstance(value, torch.Tensor | BlockWeight)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value

    def shape(self, name: str) -> torch.Size:
        return _shape(self._stored, self._sources[name])

    @property
    def types(self) -> tuple[str, ...]:
        return self._stored.types

    def nbytes(self, name: str) -> int:
        return sum(self._stored.nbytes(part) for parts in self._sources[name].names for part in parts)

    def release(self, name: str) -> None:
        source = self._sources[name]
        for i in range(len(source.names)):
            self._release_expert(source, i)

    def _release_expert(self, source: _Source, number: int) -> None:
        for name in source.names[number]:
            self._stored.release(name)


def open_stored(
    folder: Path, config: ModelConfig, dtype: torch.dtype, kernels: str = "native"
) -> TensorFiles | QuantizedWeights:
    """Return the weights of a folder as its files have them. Those that the kernels multiply stay quantized.

    Raises:
        OutriderError: a file is missing or damaged.
        UnsupportedModel: the quantization is not read.
    """
    settings = quantization_of(config)
    if settings is None:
        return TensorFiles.of(folder)
    on_triton = kernels == "triton"
    return QuantizedWeights(folder, settings, dtype, blocks=on_triton or dtype == torch.bfloat16, fp8=on_triton)


def name_weights(
    stored: TensorFiles | QuantizedWeights, config: ModelConfig, dtype: torch.dtype
) -> FolderWeights | None:
    """Return weights by their names in transformers.

    Returns:
        The weights; None if one is missing, or has another shape or type than expected, or the kernels do not support
        the model. Then transformers reads the folder, or says what is wrong with it.

    Raises:
        OutriderError: a quantized weight is damaged.
    """
    try:
        shapes = weight_shapes(config.get_text_config())
    except UnsupportedModel:
        return None
    finder = _Finder(stored, config)
    sources = {}
    for name, shape in shapes.items():
        source = finder.find(name, shape)
        if source is None:
            return None
        sources[finder.full_name(name)] = source
    if isinstance(stored, QuantizedWeights):
        _expand_different_experts(stored, sources)
    return FolderWeights(stored, sources, finder.body, dtype)


class _Finder:
    """Finds the weights of a model in its files."""

    def __init__(self, stored: TensorFiles | QuantizedWeights, config: ModelConfig) -> None:
        self.body = body_of(config)
        self._stored = stored
        self._tied = bool(config.tie_word_embeddings)
        bodies = (self.body,) if self.body == "model" else (self.body, *_OLDER_BODIES)
        self._stored_body = next((each for each in bodies if f"{each}.{_TABLES[0]}" in stored), self.body)

    def full_name(self, name: str) -> str:
        """Return the name of a weight of a text model in the whole model."""
        return f"{self.body}{name.removeprefix('model')}" if name.startswith("model.") else name

    def find(self, name: str, shape: tuple[int, ...]) -> _Source | None:
        """Return where a weight of a text model is. None: it is not there, or has another shape or type."""
        source = self._head() if name == _TABLES[1] else self._named(name, shape[0])
        if source is None or not all(self._stored.is_float(each) for parts in source.names for each in parts):
            return None
        found = tuple(_shape(self._stored, source))
        if found == shape:
            return source
        # The experts of some checkpoints have their inputs first.
        exchanged = len(shape) == 3 and source.whole is not None and found == (shape[0], shape[2], shape[1])
        return source._replace(transposed=True) if exchanged else None

    def _head(self) -> _Source | None:
        table = f"{self._stored_body}.{_TABLES[0]}"
        head = next((each for each in (_TABLES[1], _OLDER_HEAD) if each in self._stored), None)
        if not self._tied or table not in self._stored:
            return None if head is None else _Source(((head,),))
        return _Source(((table,),)) if head is None or self._equal(head, table) else None

    def _equal(self, one: str, other: str) -> bool:
        values = (self._stored[one], self._stored[other])
        first, second = (value.view(torch.uint8).numpy() for value in values if isinstance(value, torch.Tensor))
        return np.array_equal(first, second)

    def _named(self, name: str, experts: int) -> _Source | None:
        """Return the source of a weight of the decoder. `experts` is the number of experts if it has all of them."""
        for block in _BLOCKS:
            stored = f"{self._stored_body}{name.removeprefix('model')}".replace(".mlp.", f".{block}.", 1)
            if stored in self._stored:
                return _Source(((stored,),))
            owner, _, last = stored.rpartition(".")
            for parts in _EXPERT_PARTS.get(last, ()) if ".experts." in name else ():
                names = tuple(_expert_names(f"{owner}.{i}", parts) for i in range(experts))
                if all(map(self._stored.__contains__, chain.from_iterable(names))):
                    return _Source(names)
        return None


def _expert_names(expert: str, parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{expert}.{part}.weight" for part in parts)


def _shape(stored: Weights, source: _Source) -> torch.Size:
    """Return the shape of a weight. Matrices that do not fit together have an empty one."""
    if source.whole is not None:
        shape = stored.shape(source.whole)
        return torch.Size([shape[0], shape[2], shape[1]]) if source.transposed else shape
    shapes = [list(map(stored.shape, parts)) for parts in source.names]
    first = shapes[0]
    columns = {shape[1:] for shape in first}
    if len(columns) > 1 or any(other != first for other in shapes):
        return torch.Size()
    return torch.Size([len(shapes), sum(shape[0] for shape in first), *columns.pop()])


def _expand_different_experts(stored: QuantizedWeights, sources: Mapping[str, _Source]) -> None:
    """Dequantize experts that the kernels cannot multiply together, such as those with orders of inputs."""
    for source in sources.values():
        names = [name for parts in source.names for name in parts]
        weights = [stored[name] for name in names] if source.whole is None else []
        groups = instances(weights, GroupWeight)
        if groups and not (len(groups) == len(weights) and can_join(groups)):
            stored.expand(names)
