"""The checkpoint of a GRPO run."""

import pickle
from pathlib import Path
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.files import replace_tensors

_FILE = "grpo.pt"
_KEYS = frozenset({"policy", "optimizer", "steps", "version", "settings", "draft"})


def write_checkpoint(folder: str | Path, state: dict[str, Any]) -> None:
    """Write a state to a folder. An existing checkpoint stays intact if this fails.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    file = Path(folder).expanduser() / _FILE
    try:
        replace_tensors(state, file)
    except (OSError, RuntimeError) as error:
        raise OutriderError(f"{file} cannot be written ({error}); free some space, or give another folder") from error


def read_checkpoint(folder: str | Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a folder.

    Raises:
        OutriderError: there is no checkpoint, it is damaged, or it was made with other settings.
    """
    file = Path(folder).expanduser() / _FILE
    if not file.is_file():
        raise OutriderError(f"{file} does not exist; give the folder of a checkpoint, or start a new run")
    try:
        state = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise OutriderError(f"{file} cannot be read ({reason}); give another checkpoint, or start a new run") from error
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise OutriderError(f"{file} is not a checkpoint of GRPO; give another checkpoint, or start a new run")
    if changed := [name for name, value in settings.items() if state["settings"].get(name) != value]:
        name = changed[0]
        raise OutriderError(
            f"{file} was made with {name} {state['settings'].get(name)}, and {name} is"
            f" {settings[name]} now; use the same settings"
        )
    return state
