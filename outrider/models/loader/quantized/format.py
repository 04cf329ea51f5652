"""The parts that each format of quantized checkpoints gives to the loader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from outrider.errors import UnsupportedModel
from outrider.models.torch.fp8_weight import Fp8
from outrider.models.torch.group_weight import Groups, Layout
from outrider.models.torch.tensor_files import TensorFiles

Settings = Mapping[str, Any]  # quantization_config of config.json
WAY_OUT = "use a GGUF file or the unquantized checkpoint of this model"


class Parts:
    """The tensors that store one weight, by the ends of their names."""

    def __init__(self, files: TensorFiles, prefix: str) -> None:
        self.files = files
        self.prefix = prefix

    def __contains__(self, end: str) -> bool:
        return self.prefix + end in self.files

    def __getitem__(self, end: str) -> torch.Tensor:
        return self.files[self.prefix + end]

    def find(self, end: str) -> torch.Tensor | None:
        """Return a tensor, or None if the checkpoint does not have it."""
        if end not in self:
            return None
        return self[end]

    def kind(self, end: str) -> str:
        """Return the type of a tensor as safetensors names it, such as I8."""
        return self.files.kind(self.prefix + end)

    def shape(self, end: str) -> torch.Size:
        return self.files.shape(self.prefix + end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of quantized weights. The values of `layout` and `groups` are None for formats without integers."""

    name: str  # for reports, such as GPTQ
    keys: tuple[str, ...]  # the ends of names; a tensor with one of them belongs to a quantized weight
    parts: tuple[str, ...]  # the ends of the names of its other tensors
    shape: Callable[[Parts], torch.Size]  # of the weight, without reading it
    dense: Callable[[Parts], torch.Tensor]  # the weight in float32
    layout: Callable[[Parts], Layout | None] = lambda parts: None  # None: this weight is no matrix of integers
    groups: Callable[[Parts], Groups] | None = None
    is_fp8: Callable[[Parts], bool] = lambda parts: False  # whether this weight is a matrix of FP8
    fp8: Callable[[Parts], Fp8] | None = None
    weight: str = ".weight"  # the end of the name of the weight in transformers
    activations: str = ""  # how the checkpoint quantizes activations, which Outrider does not do; empty: not at all


def refuse(subject: str) -> UnsupportedModel:
    """Return the error for a format or an option that is not read."""
    return UnsupportedModel(f"{subject} is not supported; {WAY_OUT}")


def shifted(values: torch.Tensor) -> torch.Tensor:
    """Return int8 values [outputs, inputs] plus 128, in words [outputs, inputs / 4] int32."""
    unsigned = values.view(torch.uint8) ^ 128
    return functional.pad(unsigned, (0, -values.shape[1] % 4)).view(torch.int32)
