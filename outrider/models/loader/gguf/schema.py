"""How the files of an architecture describe a model of transformers: its settings, and the tensors of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from outrider.models.loader.gguf.file import GGUFFile


Settings = dict[str, Any]
FOLDER = "use the folder of the Hugging Face model"
_SUFFIXES = ("weight", "bias")


class Source(NamedTuple):
    """The tensors of a weight of transformers, and how they become the weight."""

    tensors: tuple[str, ...]  # names within their block
    make: Callable[..., torch.Tensor] | None = None  # of the configuration and the tensors; None: the only tensor
    rows: Callable[[Any, int], torch.Tensor] | None = None  # [R] the row of the tensor of each row, by their number
    module: bool = False  # whether it is a module: its weight and its bias come from the tensors with these suffixes
    experts: bool = False  # whether it has all experts of a layer, and `make` takes the tensors of one


Layout = Mapping[str, Source | tuple[Source, ...]]  # by the name of a weight or module; the first that the file has


def module(*tensors: str, **how: Any) -> Source:
    """Return the source of a module."""
    return Source(tensors, module=True, **how)


def stacked(_config: Any, *parts: torch.Tensor) -> torch.Tensor:
    """Return matrices one above the other."""
    return torch.cat(parts)


def _filled(shape: tuple[int, ...], value: float, _config: Any) -> torch.Tensor:
    return torch.full(shape, value)


def _modules(names: Mapping[str, str]) -> Layout:
    return MappingProxyType({name: module(tensor) for name, tensor in names.items()})


def experts(*tensors: str, make: Callable[..., torch.Tensor] = stacked) -> Source:
    """Return the source of the experts of a layer."""
    return Source(tuple(f"{tensor}.weight" for tensor in tensors), make, experts=True)


def gated_mlp(module_name: str, suffix: str = "") -> Layout:
    """Return the layout of a gated MLP."""
    return _modules({f"{module_name}.{part}_proj": f"ffn_{part}{suffix}" for part in ("gate", "up", "down")})


ATTENTION: Layout = _modules(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
)
LAYER: Layout = {**ATTENTION, **gated_mlp("mlp")}
TOP: Layout = _modules({"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"})


def renamed(layout: Layout, **names: str | None) -> Layout:
    """Return a layout with other tensors of some modules, whose dots are written as __; None: without the module."""
    changed = dict(layout)
    for name, tensor in names.items():
        key = name.replace("__", ".")
        changed.pop(key, None)
        if tensor is not None:
            changed[key] = module(tensor)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the files of an architecture describe a model of transformers."""

    model_type: str  # in transformers, unless `settings` has another
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the settings beyond the common ones; None: no setting
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that no field has
    settings: Callable[[GGUFFile, Settings], Settings] | None = None  # further ones, from the file and the common ones
    layer: Layout = field(default_factory=lambda: LAYER)
    top: Layout = field(default_factory=lambda: TOP)
    layers: str = "model.layers"  # the module with the layers
    norms_plus_one: bool = False  # whether the weights of the norms are those of transformers plus one
    partial_rotary: bool = False  # whether a part of each head may be rotated
    # Weights of layers that are fields with a value for each layer, and their shapes.
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    spare: tuple[str, ...] = ()  # modules of layers that files have and some layers of the model do not have

    def sources(self, file: GGUFFile, layers: int) -> Iterator[tuple[str, Source]]:
        """Yield the name of each weight in transformers that the file has, and its source with full names.

        Args:
            layers: the number of blocks to list, from the first one on.
        """
        for name, choice in self.top.items():
            yield from _present(file, name, choice, "")
        for i in range(layers):
            for name, choice in self.layer.items():
                yield from _present(file, f"{self.layers}.{i}.{name}", choice, f"blk.{i}.")
            for name, (key, shape) in self.values.items():
                yield f"{self.layers}.{i}.{name}", Source((), partial(_filled, shape, file.size(key)[i]))

    def tensor_of(self, name: str) -> str:
        """Return the name of the tensor, or the first one, of a weight of transformers."""
        layout, prefix, part = self.top, "", name
        if name.startswith(f"{self.layers}."):
            number, _, part = name.removeprefix(f"{self.layers}.").partition(".")
            layout, prefix = self.layer, f"blk.{number}."
        owner, _, suffix = part.rpartition(".")
        for key, ending in ((part, ""), (owner, f".{suffix}")):
            if key in layout:
                return f"{prefix}{_choices(layout[key])[0].tensors[0]}{ending}"
        return name


def _choices(choice: Source | tuple[Source, ...]) -> tuple[Source, ...]:
    return (choice,) if isinstance(choice, Source) else choice


def _present(
    file: GGUFFile, name: str, choice: Source | tuple[Source, ...], prefix: str
) -> Iterator[tuple[str, Source]]:
    """Yield the weights of a module, or one weight, if the file has all of its tensors."""
    for source in _choices(choice):
        found = False
        for suffix in _SUFFIXES if source.module else ("",):
            ending = f".{suffix}" if suffix else ""
            tensors = tuple(f"{prefix}{tensor}{ending}" for tensor in source.tensors)
            if all(tensor in file.tensors for tensor in tensors):
                found = True
                yield f"{name}{ending}", source._replace(tensors=tensors)
        if found:
            return


def head_rows(heads: Callable[[Any], int], config: Any, rows: int) -> torch.Tensor:
    """Return the row in a GGUF file of each row of q or k in transformers, which has halves instead of pairs."""
    return torch.arange(rows).view(heads(config), -1, 2).transpose(1, 2).flatten()


# Rows of q and k that have the two halves of a rotary head as neighbors.
PERMUTED: Layout = {
    "self_attn.q_proj": module("attn_q", rows=partial(head_rows, lambda config: config.num_attention_heads)),
    "self_attn.k_proj": module("attn_k", rows=partial(head_rows, lambda config: config.num_key_value_heads)),
}


def layer_types(file: GGUFFile, layers: int, period: int) -> list[str]:
    """Return the types of the attention layers. If the file does not say, each `period`-th layer is full."""
    pattern = file.size("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        sliding = list(map(bool, pattern))
    else:
        sliding = [(i + 1) % pattern > 0 for i in range(layers)]
    kinds = ("full_attention", "sliding_attention")
    window = file.size("attention.sliding_window", 0)
    return [kinds[sliding[i] and window > 0] for i in range(layers)]
