"""The files of a set of models: config.json, and a safetensors file for each network."""

import json
import lzma
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import nn

from outrider.errors import OutriderError


def write_set(config: dict[str, Any], networks: Any, folder: Path) -> None:
    """Write a set, with the weights in bfloat16. `networks` is a record whose fields name the networks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, module in _modules(networks).items():
        weights = {key: value.to(torch.bfloat16).contiguous() for key, value in module.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    """Return what config.json holds. Raises OutriderError if there is no such file, or it is not a JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise OutriderError(
            f"{folder} has no readable config.json; name a folder that recipes.video or recipes.audio wrote"
        )
    return config


def read_weights(networks: Any, folder: Path) -> None:
    """Load the weights of all networks of a record, in float32. The files of the embedded set are compressed."""
    for name, module in _modules(networks).items():
        file = folder / f"{name}.safetensors"
        packed = folder / f"{file.name}.xz"
        module.load_state_dict(load(lzma.decompress(packed.read_bytes())) if packed.is_file() else load_file(file))
        module.eval().requires_grad_(False)


def _modules(networks: Any) -> dict[str, nn.Module]:
    values = {field.name: getattr(networks, field.name) for field in fields(networks)}
    return {name: value for name, value in values.items() if isinstance(value, nn.Module)}
