"""Trained drafts on disk, in Outrider's own format: the description as JSON, and the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError
from outrider.heads.description import Description
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent

KEY = "outrider_draft"  # in config.json
WEIGHTS = "model.safetensors"


def make_module(description: Description) -> Follower | Independent:
    """A module with fresh weights."""
    return Follower(description) if description.body else Independent(description)


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds a trained draft in this format."""
    try:
        return KEY in json.loads((Path(folder).expanduser() / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_head(folder: str | Path, *, dtype: torch.dtype, device: torch.device) -> Follower | Independent:
    """Load a trained draft.

    Raises:
        OutriderError: a file is missing, truncated or of another shape, or holds what is no number.
    """
    path = Path(folder).expanduser()
    try:
        data = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path / 'config.json'} cannot be read ({error}); copy the draft again") from error
    if not isinstance(data, dict) or KEY not in data:
        raise OutriderError(f"{path} holds no trained draft; give a folder written by `outrider train`")
    description = Description.from_json(data[KEY])
    try:
        weights = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise OutriderError(f"{path / WEIGHTS} cannot be read ({error}); copy the draft again") from error
    return filled(description, weights, where=str(path)).to(device=device, dtype=dtype).requires_grad_(False).eval()


def filled(description: Description, weights: Mapping[str, torch.Tensor], *, where: str) -> Follower | Independent:
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
        if weights[name].is_floating_point() and not bool(weights[name].isfinite().all()):
            raise OutriderError(f"{where}: {name} holds what is no number; training went wrong, or the file is damaged")
    ids = weights.get("ids")
    if ids is not None and not (bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < description.vocab):
        raise OutriderError(f"{where}: the guessed tokens are not rising ids below {description.vocab}")
    module.load_state_dict(dict(weights), assign=True)
    if "ids" not in weights:
        module.register_buffer("ids", torch.arange(description.guessed), persistent=False)
    return module


def write_head(folder: str | Path, module: Follower | Independent, *, dtype: torch.dtype, **facts: Any) -> None:
    """Save a trained draft; `facts` go beside the description. What lay there survives a failure.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    path = Path(folder).expanduser()
    weights = {
        name: (value.detach().to(dtype) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in module.state_dict().items()
    }
    config = {"model_type": KEY, KEY: module.description.to_json(), **facts}
    try:
        path.mkdir(parents=True, exist_ok=True)
        fresh = path / (WEIGHTS + ".new"), path / "config.json.new"
        save_file(weights, fresh[0])
        fresh[1].write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        for file in fresh:
            file.replace(file.with_suffix(""))
    except (OSError, SafetensorError) as error:
        for file in path.glob("*.new"):
            file.unlink(missing_ok=True)
        raise OutriderError(f"{path} cannot be written ({error}); free some space, or give another folder") from error
