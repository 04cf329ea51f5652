"""Keep what was computed from a model's weights in the cache folder, for later starts."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from outrider.errors import OutriderError
from outrider.models.loader.fingerprint import code_fingerprint, model_fingerprint
from outrider.models.native.library import cache_folder
from outrider.runtime.atomic_files import write_whole

_FILES = 8  # of each kind


def computed_once(
    kind: str, folder: str, facts: Any, compute: Callable[[], Mapping[str, torch.Tensor]]
) -> Mapping[str, torch.Tensor]:
    """Return tensors from the cache folder, or compute them and keep them there.

    Args:
        kind: the first part of the file's name.
        folder: of the model, or its file; empty: the model was not loaded from files, and nothing is kept.
        facts: what the tensors depend on, besides the model and the code. It can be written as JSON.
        compute: returns the tensors.
    """
    file = _file(kind, folder, facts)
    tensors = _read(file)
    if tensors is None:
        tensors = compute()
        _write(file, tensors)
    return tensors


def _file(kind: str, folder: str, facts: Any) -> Path | None:
    """Return the file of the tensors. None: there is none."""
    if not folder:
        return None
    key = json.dumps([model_fingerprint(Path(folder)), code_fingerprint(), facts])
    try:
        return cache_folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    except OutriderError:
        return None


def _read(file: Path | None) -> Mapping[str, torch.Tensor] | None:
    """Return kept tensors. None: there are none, or the file is damaged."""
    if file is None:
        return None
    try:
        return load_file(file)
    except (OSError, SafetensorError):
        return None


def _write(file: Path | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Keep tensors. If the cache folder cannot be written, the next start computes them again."""
    if file is None:
        return
    with suppress(OSError, OutriderError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, save(dict(tensors)))
        kind = file.name.partition("-")[0]
        for old in sorted(file.parent.glob(f"{kind}-*"), key=lambda each: each.stat().st_mtime)[:-_FILES]:
            old.unlink(missing_ok=True)
