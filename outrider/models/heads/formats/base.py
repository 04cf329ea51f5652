"""The `Format` protocol, and helpers that all formats use.

Formats are pure functions: reading maps a config and tensors to a description and weights, and
writing does the inverse. Weights have the names of the module's state_dict. Some formats leave out
values that their target determines, so the target may be given as `TargetInfo`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import HeadDescription

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Written = tuple[Config, Tensors]

_FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class TargetRequired(OutriderError):
    """The checkpoint leaves out something that its target determines, but no target was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """The known facts about the target that a draft head belongs to."""

    vocab: int
    hidden: int
    layers: int
    context: int | None = None  # tokens
    name: str | None = None
    head: Callable[[], torch.Tensor] | None = None  # loads the LM head [V, H]
    embedding: Callable[[], torch.Tensor] | None = None  # loads the input of the first layer by token, [V, H]
    unused_id: int | None = None  # an id that no token has, if one is known
    layer_types: tuple[str, ...] = ()  # from the config; () if it has none


class Format(ABC):
    """A checkpoint format of draft heads."""

    name: str  # for `--to`
    title: str  # a human-readable name with the projects that use the format
    file: str = "model.safetensors"  # the name of the file for the tensors

    @abstractmethod
    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return whether a checkpoint with this config and these tensor names is in this format."""

    def module(self, names: Collection[str]) -> str | None:
        """Return the prefix of the draft head's tensors in a full model, or None if the format has no such prefix."""
        return None

    @abstractmethod
    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        """Return the draft head of a checkpoint.

        Raises:
            TargetRequired: the target is needed.
            OutriderError: something is missing, contradictory or not supported.
        """

    @abstractmethod
    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        """Return the config and tensors of a draft head.

        Raises:
            TargetRequired: the target is needed.
            OutriderError: the format cannot represent this draft head.
        """


def stored(weights: Tensors, names: Mapping[str, str], *, optional: bool = False) -> dict[str, torch.Tensor]:
    """Return weights by their names in a format. The arguments are those of `Source.take_all`."""
    return {stored: weights[name] for name, stored in names.items() if not optional or name in weights}


class Source:
    """A checkpoint that is being imported. Each tensor must be taken or ignored; `close` checks this."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: TargetInfo | None
    ) -> None:
        self.config = ConfigReader(config)
        self.target = target
        self._tensors = tensors
        self._unhandled = set(tensors)
        self._ignored: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor and mark it as taken."""
        if name not in self._tensors:
            raise OutriderError(f"there is no tensor {name!r}; copy the draft head again")
        self._unhandled.discard(name)
        tensor = self._tensors[name]
        if not tensor.dim() or not tensor.numel():
            raise OutriderError(
                f"{name} has shape {tuple(tensor.shape)} and so holds no weights; copy the draft head again"
            )
        if tensor.is_floating_point() and tensor.dtype not in _FLOAT_DTYPES:
            raise OutriderError(
                f"{name} is stored as {tensor.dtype}; quantized draft heads are not supported, use an unquantized one"
            )
        return tensor

    def take_all(self, names: Mapping[str, str], *, optional: bool = False) -> dict[str, torch.Tensor]:
        """Take the tensors of a format: `names` maps Outrider's names to its own. `optional`: only those it has."""
        return {name: self.take(stored) for name, stored in names.items() if not optional or stored in self}

    def ignore(self, names: Iterable[str], why: str) -> None:
        """Ignore those of these tensors that were not taken. The reason `why` is shown to users."""
        if ignored := tuple(sorted(name for name in names if name in self._unhandled)):
            self._unhandled.difference_update(ignored)
            self._ignored[why] = ignored

    def close(self) -> Mapping[str, tuple[str, ...]]:
        """Return the ignored tensors by reason. Raises OutriderError if a tensor was neither taken nor ignored."""
        if unhandled := sorted(self._unhandled):
            raise OutriderError(
                f"{unhandled[0]!r} (and {len(unhandled) - 1} more) is unknown in this format, so the draft head may"
                " compute something else than expected; use a checkpoint in a supported format"
            )
        return self._ignored

    def target_layers(self, derived: int = 0) -> int:
        """Return the number of layers of the target.

        Args:
            derived: used if neither the config nor the target has the number; 0: unknown.

        Raises:
            TargetRequired: the number is unknown.
        """
        configured = self.config.integer("num_target_layers", 0) or self.config.integer("target_layers", 0)
        layers = configured or (self.target.layers if self.target else derived)
        if not layers:
            raise TargetRequired(
                "the checkpoint does not say how many layers its target has; give the target with --target DIR"
            )
        return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedHead:
    """An imported draft head."""

    description: HeadDescription
    weights: Tensors
    ignored: Mapping[str, tuple[str, ...]]  # ignored tensors by reason
    format: str  # the title of its format
    stored_name: Callable[[str], str] | None = None  # name in the checkpoint of a weight; None: not known


def refuse(name: str, reasons: Mapping[str, bool]) -> None:
    """Raise OutriderError for the first reason that applies.

    Args:
        name: a format that cannot represent the draft head.
        reasons: what the format cannot represent, as in "it <reason>", and whether this applies. A
            reason may end with advice after a semicolon.
    """
    for reason, applies in reasons.items():
        if applies:
            advice = "" if ";" in reason else "; use another format"
            raise OutriderError(f"format {name} cannot represent this draft head, because it {reason}{advice}")


def shared_lm_head(target: TargetInfo | None, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the target's LM head [V, H] or its rows `ids`, for a draft head without its own."""
    if target is None or target.head is None:
        raise TargetRequired(
            "this format stores an LM head, but the draft head uses its target's; give the target with --target DIR"
        )
    return target.head() if ids is None else target.head()[ids]


def shared_embedding(target: TargetInfo | None) -> torch.Tensor:
    """Return the target's embedding [V, H], for a draft head without its own."""
    if target is None or target.embedding is None:
        raise TargetRequired(
            "the mask is a row of the target's embedding, which is not known; give the target with --target DIR"
        )
    return target.embedding()


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tables are equal. They may be on different devices and have different dtypes."""
    return one.shape == two.shape and torch.equal(one.to(two), two)
