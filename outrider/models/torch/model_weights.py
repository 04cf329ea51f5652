"""The weights of a model of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.models.torch.gguf_linear import BlockEmbedding, BlockLinear
from outrider.models.torch.gguf_made import BlockExperts
from outrider.models.torch.submodel import layer_stack
from outrider.models.torch.weights import Weight, Weights


class ModelWeights(Weights):
    """The weights of a model of transformers."""

    def __init__(self, model: Any, path: Path) -> None:
        """Take the weights of a model that was loaded from a path."""
        self.path = path
        self.body = layer_stack(model)[0].rpartition(".")[0]
        self._values: dict[str, Weight] = {name: value.detach() for name, value in model.state_dict().items()}
        for name, module in model.named_modules():
            if isinstance(module, BlockLinear | BlockEmbedding):
                self._values[f"{name}.weight"] = module.blocks
            elif isinstance(module, BlockExperts):
                self._values[name] = module.blocks

    def __getitem__(self, name: str) -> Weight:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def shape(self, name: str) -> torch.Size:
        return self._values[name].shape

    def nbytes(self, name: str) -> int:
        return self._values[name].nbytes

    @property
    def types(self) -> tuple[str, ...]:
        kinds = (value.kind for value in self._values.values() if not isinstance(value, torch.Tensor))
        return tuple(sorted({part for kind in kinds for part in kind.split("+") if part}))
