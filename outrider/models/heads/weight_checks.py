"""Check that the weights of a checkpoint are those of a draft head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.modules.centroids import TOKEN_ORDER

_INTEGERS = ("ids", TOKEN_ORDER)  # weights that are not floating-point


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a checkpoint and its weights in errors."""

    where: str  # the checkpoint
    stored: Callable[[str], str]  # returns the name of a weight in the checkpoint

    def label(self, name: str) -> str:
        """Return the name of a weight in the checkpoint, and Outrider's name if it differs."""
        stored = self.stored(name)
        return name if stored == name else f"{stored} ({name} in Outrider)"


def check_weights(
    description: HeadDescription,
    expected: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    names: Names,
) -> None:
    """Check that these are the weights of a draft head.

    Args:
        expected: the weights of a module of this architecture, of which only names and shapes are read.
        weights: the weights by name.
        names: the names of the checkpoint and its weights in errors.

    Raises:
        OutriderError: a weight is missing, unexpected, of another shape or dtype, NaN, infinite or otherwise invalid.
    """
    _check_names(description, expected, weights, names)
    for name, value in expected.items():
        _check_weight(name, weights[name], tuple(value.shape), names)
    if "ids" in weights:
        _check_ids(weights["ids"], description.vocab, names)
    if TOKEN_ORDER in weights:
        _check_token_order(weights[TOKEN_ORDER], names)


def _check_names(
    description: HeadDescription,
    expected: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    names: Names,
) -> None:
    if missing := sorted(expected.keys() - weights.keys()):
        raise OutriderError(
            f"{names.where} lacks {names.stored(missing[0])!r} (and {len(missing) - 1} more); copy the draft head again"
        )
    if unexpected := sorted(weights.keys() - expected.keys()):
        raise OutriderError(
            f"{names.where} has {names.stored(unexpected[0])!r}, which a draft head of kind"
            f" {description.kind} does not have; copy it again"
        )


def _check_weight(name: str, weight: torch.Tensor, expected_shape: tuple[int, ...], names: Names) -> None:
    """Check shape, dtype and values of one weight."""
    shape = tuple(weight.shape)
    if shape != expected_shape:
        raise OutriderError(
            f"{names.where}: {names.label(name)} has shape {shape} instead of {expected_shape}; copy it again"
        )
    must_be_float = name not in _INTEGERS
    if weight.is_floating_point() is not must_be_float:
        kind = "floating-point" if must_be_float else "integer"
        raise OutriderError(
            f"{names.where}: {names.label(name)} has dtype {weight.dtype} instead of a {kind} type; copy it again"
        )
    if weight.is_floating_point() and not bool(weight.isfinite().all()):
        raise OutriderError(
            f"{names.where}: {names.label(name)} has values that are NaN or infinite; copy it"
            " again, or train it again if the training diverged"
        )


def _check_ids(ids: torch.Tensor, vocab: int, names: Names) -> None:
    """Check the ids of a draft vocabulary."""
    ascend = bool((ids.diff() > 0).all())
    if not (ascend and int(ids[0]) >= 0 and int(ids[-1]) < vocab):
        raise OutriderError(
            f"{names.where}: the ids of the draft vocabulary must ascend and be below {vocab}; copy it again"
        )


def _check_token_order(order: torch.Tensor, names: Names) -> None:
    if order.flatten().sort().values.tolist() != list(range(order.numel())):
        raise OutriderError(f"{names.where}: each token must be in one cluster of {TOKEN_ORDER}; copy it again")
