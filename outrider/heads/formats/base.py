"""What a format is, and what every one of them is read with.

Reading and writing are pure: config and tensors to description and weights, and back. Weights have the names of the
module's state_dict. A checkpoint leaves some things to the target that it belongs to; those come with the `Partner`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import HeadDescription

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class UnusedTensors(OutriderError):
    """What the checkpoint leaves out must come from its target, and none was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """The target that a draft belongs to."""

    vocab: int
    hidden: int
    layers: int
    context: int | None = None  # tokens
    name: str | None = None
    head: Callable[[], torch.Tensor] | None = None  # reads its output layer [V, H]
    embedding: Callable[[], torch.Tensor] | None = None  # reads its embeddings [V, H], as tokens enter the first layer
    spare: int | None = None  # an id that no token has, if one is known
    kinds: tuple[str, ...] = ()  # of its layers, as transformers names them, where it does


class Format(Protocol):
    """A way in which drafts are written down."""

    @property
    def name(self) -> str:
        """As `--to` takes it."""

    @property
    def title(self) -> str:
        """Whose it is, for people."""

    @property
    def file(self) -> str:
        """Which file its tensors are written to."""

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a checkpoint with this config and these tensors is of this format."""

    def module(self, names: Collection[str]) -> str | None:
        """What the names of the draft's tensors begin with, where a whole model may stand beside them; else None."""

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        """The draft that a checkpoint holds.

        Raises:
            Unowned: the target must be known.
            OutriderError: something is missing, contradicts itself, or cannot be run here.
        """

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        """Config and tensors of a draft.

        Raises:
            Unowned: the target must be known.
            OutriderError: the format cannot hold this draft.
        """


class Source:
    """A checkpoint that is being read: nothing in it goes unnoticed."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], partner: TargetInfo | None
    ) -> None:
        self.config, self.partner = Settings(config), partner
        self._tensors, self._open = tensors, set(tensors)
        self._ignored: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def take(self, name: str) -> torch.Tensor:
        """A tensor, which counts as used from now on."""
        if name not in self._tensors:
            raise OutriderError(f"there is no tensor {name!r}; copy the draft again")
        self._open.discard(name)
        found = self._tensors[name]
        if not found.dim() or not found.numel():
            raise OutriderError(f"{name} has shape {tuple(found.shape)} and so holds no weights; copy the draft again")
        if found.is_floating_point() and found.dtype not in _FLOATS:
            raise OutriderError(f"{name} is stored as {found.dtype}; quantised drafts are not handled, take plain ones")
        return found

    def ignore(self, names: Iterable[str], why: str) -> None:
        """Leave tensors aside, if there are any, for a reason that people will read."""
        if left := tuple(sorted(name for name in names if name in self._open)):
            self._open.difference_update(left)
            self._ignored[why] = left

    def close(self) -> Mapping[str, tuple[str, ...]]:
        """What was left aside, by the reason.

        Raises:
            OutriderError: there are tensors that nobody looked at.
        """
        if rest := sorted(self._open):
            raise OutriderError(
                f"{rest[0]!r} (and {len(rest) - 1} more) is no part of such a draft as it is known here; what it would"
                " change is unknown, so the draft is refused"
            )
        return self._ignored

    def target_layers(self, guess: int = 0) -> int:
        """How many layers the target has; `guess` is what the layers tapped give away.

        Raises:
            Unowned: nobody knows.
        """
        said = self.config.whole("num_target_layers", 0) or self.config.whole("target_layers", 0)
        known = said or (self.partner.layers if self.partner else guess)
        if not known:
            raise UnusedTensors("it does not say how many layers its target has; give the target with --target DIR")
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A draft as it was found."""

    description: HeadDescription
    weights: Tensors
    ignored: Mapping[str, tuple[str, ...]]  # tensors left aside, by the reason
    format: str  # its title


def refuse(name: str, reasons: Mapping[str, bool]) -> None:
    """Refuse to write what a format cannot hold: the first reason that holds is told."""
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise OutriderError(f"format {name} cannot hold this draft, which {found[0]}")


def shared_lm_head(partner: TargetInfo | None, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The target's output layer [V, H] or its rows of `ids`, where a format writes it and the draft has none itself."""
    if partner is None or partner.head is None:
        raise UnusedTensors(
            "this format holds an output layer, and the draft uses its target's; give it with --target DIR"
        )
    return partner.head() if ids is None else partner.head()[ids]


def shared_embedding(partner: TargetInfo | None) -> torch.Tensor:
    """The target's embeddings [V, H], where a format speaks of them and the draft has none itself."""
    if partner is None or partner.embedding is None:
        raise UnusedTensors("its mask is a row of its target's embeddings; give the target with --target DIR")
    return partner.embedding()


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether a table that a checkpoint holds is a mere copy of the target's, wherever that lies."""
    return one.shape == two.shape and torch.equal(one.to(two), two)
