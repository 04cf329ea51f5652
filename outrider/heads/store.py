"""Trained drafts on disk: in Outrider's own format, the description as JSON and the weights, and read in others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.errors import OutriderError
from outrider.heads.description import HeadDescription
from outrider.heads.files import read_config, text_config, write_folder
from outrider.heads.formats.base import TargetInfo, Trained
from outrider.heads.formats.registry import find
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.modules.block import BlockHead
from outrider.heads.modules.kv_sharing import KVSharingHead
from outrider.heads.modules.parallel import ParallelHead

KEY = "outrider_draft"  # in config.json
WEIGHTS = "model.safetensors"
OWN = "outrider"  # the name of this format
HeadModule = AutoregressiveHead | ParallelHead | BlockHead | KVSharingHead

_log = logging.getLogger("outrider")


def make_module(description: HeadDescription) -> HeadModule:
    """A module with fresh weights."""
    if description.block:
        return BlockHead(description)
    if description.shared_kv:
        return KVSharingHead(description)
    return AutoregressiveHead(description) if description.body else ParallelHead(description)


def is_head(folder: str | Path, partner: Callable[[], TargetInfo | None] | None = None) -> bool:
    """Whether a folder holds a trained draft in a known format.

    A whole model that brings a module along is one to its own target alone, a `partner` of its sizes; to all others it
    is a draft model. `partner` is only called for where that must be decided.

    Raises:
        OutriderError: a file is damaged, or the draft is of a kind that is known and not handled.
    """
    path = Path(folder).expanduser()
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict) or KEY in config:
        return isinstance(config, dict)
    found = find(path)
    if found is None or not found.whole():
        return found is not None
    target = partner() if partner else None
    return target is not None and found.belongs(target)


def read_trained(folder: str | Path, partner: TargetInfo | None = None) -> Trained:
    """What a folder holds, with weights as they are stored. `filled` shows whether they fit.

    Raises:
        Unowned: the target must be known, and no `partner` was given.
        OutriderError: a file is missing or damaged, or there is no draft that can be run here.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    if KEY in config:
        description = HeadDescription.from_json(config[KEY])
        try:
            weights = load_file(path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise OutriderError(f"{path / WEIGHTS} cannot be read ({error}); copy the draft again") from error
        return Trained(description=description, weights=weights, ignored={}, format="Outrider's own")
    found = find(path)
    if found is None:
        raise OutriderError(f"{path} holds no trained draft in a known format; see docs/reference/formats.md")
    if text_config(config).get("quantization_config") or config.get("quantization_config"):
        _log.warning("%s: config.json speaks of quantised weights, and the draft's are read as plain numbers", path)
    try:
        return found.read(partner)
    except OutriderError as error:
        raise type(error)(f"{path}: {error}") from error


def read_head(
    folder: str | Path, *, dtype: torch.dtype, device: torch.device, partner: TargetInfo | None = None
) -> HeadModule:
    """Load a trained draft; `partner` is its target, of which other formats leave something out.

    Raises:
        OutriderError: a file is missing, truncated or of another shape, or holds what is no number.
    """
    found = read_trained(folder, partner)
    for why, names in found.ignored.items():
        _log.warning("%s: %d tensors are left aside (%s): %s", folder, len(names), why, names[0])
    module = filled(found.description, found.weights, where=str(folder))
    return module.to(device=device, dtype=dtype).requires_grad_(False).eval()


def filled(description: HeadDescription, weights: Mapping[str, torch.Tensor], *, where: str) -> HeadModule:
    """A module with these weights, every one of which it must have, and no other.

    Raises:
        OutriderError: they do not fit, or are not numbers.
    """
    with torch.device("meta"):
        module = make_module(description)
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    if missing := sorted(wanted.keys() - given.keys()):
        raise OutriderError(f"{where} lacks {missing[0]!r} (and {len(missing) - 1} more); copy the draft again")
    if odd := sorted(given.keys() - wanted.keys()):
        raise OutriderError(f"{where} has {odd[0]!r}, for which a draft of kind {description.kind} has no place")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise OutriderError(f"{where}: {name} has shape {given[name]} where {shape} is expected")
        if weights[name].is_floating_point() is not (name != "ids"):
            raise OutriderError(
                f"{where}: {name} is stored as {weights[name].dtype}, which it cannot be; copy it again"
            )
        if weights[name].is_floating_point() and not bool(weights[name].isfinite().all()):
            raise OutriderError(f"{where}: {name} holds what is no number; training went wrong, or the file is damaged")
    ids = weights.get("ids")
    if ids is not None and not (bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < description.vocab):
        raise OutriderError(f"{where}: the guessed tokens are not rising ids below {description.vocab}")
    module.load_state_dict(dict(weights), assign=True)
    if "ids" not in weights:
        module.register_buffer("ids", torch.arange(description.output_vocab), persistent=False)
    return module


def write_head(folder: str | Path, module: HeadModule, *, dtype: torch.dtype, **facts: Any) -> None:
    """Save a trained draft; `facts` go beside the description. What lay there survives a failure.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    weights = {
        name: value.detach().to(dtype) if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    config = {"model_type": KEY, KEY: module.description.to_json(), **facts}
    write_folder(Path(folder).expanduser(), config, weights, WEIGHTS)
