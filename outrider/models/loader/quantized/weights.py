"""The weights of a quantized checkpoint, by their names in the `state_dict` of transformers."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from outrider.errors import OutriderError
from outrider.models.loader.memory import gigabytes
from outrider.models.loader.quantized.awq import awq
from outrider.models.loader.quantized.bitsandbytes import bitsandbytes
from outrider.models.loader.quantized.compressed import compressed_tensors
from outrider.models.loader.quantized.format import Format, Parts, Settings, refuse
from outrider.models.loader.quantized.fp8 import fp8
from outrider.models.loader.quantized.gptq import gptq
from outrider.models.loader.quantized.mxfp4 import mxfp4
from outrider.models.torch.checkpoint import WeightFormat
from outrider.models.torch.fp8_weight import Fp8Weight
from outrider.models.torch.group_weight import GroupWeight, Layout
from outrider.models.torch.tensor_files import TensorFiles
from outrider.models.torch.weights import Weight, Weights

_FORMATS: Mapping[str, Callable[[Settings], Format]] = MappingProxyType(
    {
        "awq": awq,
        "bitsandbytes": bitsandbytes,
        "compressed-tensors": compressed_tensors,
        "fp8": fp8,
        "gptq": gptq,
        "mxfp4": mxfp4,
    }
)
_DAMAGE = (RuntimeError, ValueError, LookupError, ArithmeticError, StopIteration)
_log = logging.getLogger("outrider")
Value = TypeVar("Value")


def quantization_of(config: Any) -> Settings | None:
    """Return how a checkpoint is quantized, from its configuration; None: it is not."""
    for each in (config, config.get_text_config(decoder=True)):
        if settings := getattr(each, "quantization_config", None):
            return settings if isinstance(settings, Mapping) else dict(settings.to_dict())
    return None


def take_quantization(config: Any) -> Settings | None:
    """Return what `quantization_of` does, and remove it.

    Transformers then makes a model of dense layers, without packages for quantized weights.
    """
    settings = quantization_of(config)
    for each in (config, config.get_text_config(decoder=True)):
        each.__dict__.pop("quantization_config", None)
    return settings


def integer_bits(config: Any) -> int:
    """Return the least bits of integers that the native kernels keep, from a configuration; 16: there are none."""
    settings = quantization_of(config) or {}
    groups = (settings.get("config_groups") or {}).values()
    weights = [each["weights"] for each in groups if (each.get("weights") or {}).get("type") == "int"]
    bits = [settings.get("bits"), settings.get("w_bit"), *(each.get("num_bits") for each in weights)]
    return min(filter(None, bits), default=8 if settings.get("load_in_8bit") else 16)


def find_format(settings: Settings) -> Format:
    """Return the format of a quantization. Raises UnsupportedModel if it is not read, or one of its options is not."""
    method = str(settings.get("quant_method"))
    if method == "None" and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        method = "bitsandbytes"
    if method == "None":
        raise refuse("a quantization_config without quant_method in config.json")
    if method not in _FORMATS:
        raise refuse(f"the quantization {method!r} (Outrider reads {', '.join(_FORMATS)})")
    return _FORMATS[method](settings)


class QuantizedWeights(Weights):
    """The weights of a folder. A value is made when it is accessed.

    Matrices of integers that the native kernels multiply without loss are a `GroupWeight` if
    `blocks` is set, and matrices of FP8 are an `Fp8Weight` if `fp8` is set. Other quantized weights
    are tensors of the type `dtype`. Those that are not quantized are as they are stored.
    """

    def __init__(
        self, folder: Path, settings: Settings, dtype: torch.dtype, *, blocks: bool = False, fp8: bool = False
    ) -> None:
        """List the weights.

        Raises:
            OutriderError: the files are missing or damaged.
            UnsupportedModel: the quantization is not read.
        """
        self.path = folder
        self.format = find_format(settings)
        self._dtype = dtype
        self._files = TensorFiles.of(folder)
        form = self.format
        prefixes = {name.removesuffix(key) for name in self._files for key in form.keys if name.endswith(key)}
        self._quantized = {prefix + form.weight: Parts(self._files, prefix) for prefix in prefixes}
        stored = {prefix + end for prefix in prefixes for end in (*form.keys, *form.parts)}
        self._dense = self._files.keys() - stored
        # The kinds of matrices that stay as they are, and the sizes of those of integers. All others are dequantized.
        self._kinds: dict[str, str] = {}
        self._layouts: dict[str, Layout] = {}
        for name in self._quantized if blocks else ():
            if (layout := self._of(name, form.layout)) is not None and layout.packable:
                self._layouts[name] = layout
                self._kinds[name] = f"int{layout.bits}"
            elif fp8 and self._of(name, form.is_fp8):
                self._kinds[name] = "fp8"
        if not prefixes:
            raise OutriderError(
                f"config.json in {folder} says that the weights are quantized ({form.name}), and none of them is;"
                " remove quantization_config from it, or copy both from one checkpoint"
            )

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._kinds.values())))

    def __len__(self) -> int:
        return len(self._quantized) + len(self._dense)

    def __iter__(self) -> Iterator[str]:
        yield from self._quantized
        yield from self._dense

    def __contains__(self, name: object) -> bool:
        return name in self._quantized or name in self._dense

    def __getitem__(self, name: str) -> Weight:
        if name not in self._quantized:
            return self._files[name]
        kind = self._kinds.get(name)
        if kind is None:
            return self._of(name, self.format.dense).to(self._dtype)
        groups, fp8 = self.format.groups, self.format.fp8
        if kind == "fp8":
            assert fp8 is not None
            return Fp8Weight(partial(self._of, name, fp8), self.shape(name), self._stored_bytes(name))
        assert groups is not None
        return GroupWeight(partial(self._of, name, groups), self._layouts[name], self._stored_bytes(name))

    def is_float(self, name: str) -> bool:
        """Return whether a weight has float values."""
        return name in self._quantized or self._files.is_float(name)

    def release(self, name: str) -> None:
        for each in self._stored_names(name) if name in self._quantized else (name,):
            self._files.release(each)

    def expand(self, names: Iterable[str]) -> None:
        """Dequantize these weights, also those whose integers the native kernels multiply."""
        for name in names:
            self._kinds.pop(name, None)

    def _of(self, name: str, read: Callable[[Parts], Value]) -> Value:
        """Read something of a quantized weight."""
        try:
            return read(self._quantized[name])
        except _DAMAGE as error:
            raise OutriderError(
                f"{name} in {self.path} is no {self.format.name} weight ({error}); copy the checkpoint again"
            ) from error

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight, without making it. Raises OutriderError if the checkpoint does not have it."""
        return self._of(name, self.format.shape) if name in self._quantized else self._files.shape(name)

    def _stored_bytes(self, name: str) -> int:
        """Return the bytes of a quantized weight in the files."""
        return sum(map(self._files.nbytes, self._stored_names(name)))

    def _stored_names(self, name: str) -> list[str]:
        """Return the names of the tensors of a quantized weight."""
        prefix = self._quantized[name].prefix
        names = (prefix + end for end in (*self.format.keys, *self.format.parts))
        return [each for each in names if each in self._files]

    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight in memory."""
        if name in self._kinds:
            return self._stored_bytes(name)
        return self.shape(name).numel() * self._dtype.itemsize

    def total_bytes(self) -> int:
        """Return the bytes of all weights in memory."""
        return sum(map(self.nbytes, self))

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """Return how the matrices are held, where `dtype` is the type of those that are in no blocks."""
        name = str(dtype).removeprefix("torch.")
        types = set()
        bits = 0
        count = 0
        for weight in self:
            shape = self.shape(weight)
            if len(shape) < 2:
                continue
            kind = self._kinds.get(weight)
            held = kind or name
            types.add(f"{held} (from {self.format.name})" if weight in self._quantized else held)
            bits += 8 * (self._stored_bytes(weight) if kind else shape.numel() * dtype.itemsize)
            count += shape.numel()
        return WeightFormat(tuple(sorted(types)), bits / count)

    def report(self, dtype: torch.dtype) -> None:
        """Log what the checkpoint has that the model does not: weights that are expanded, and activations."""
        name = str(dtype).removeprefix("torch.")
        expanded = sorted(self._quantized.keys() - self._kinds.keys())
        if expanded:
            size = sum(self.shape(weight).numel() for weight in expanded) * dtype.itemsize
            stored = sum(map(self._stored_bytes, expanded))
            _log.info(
                "%d %s weights are dequantized to %s, which takes %s instead of %s",
                len(expanded), self.format.name, name, gigabytes(size), gigabytes(stored),
            )  # fmt: skip
        if self.format.activations:
            _log.info(
                "the checkpoint quantizes activations (%s) as well; Outrider runs its dequantized"
                " weights with activations of its own precision",
                self.format.activations,
            )
