"""Load and save draft heads: in Outrider's own format, a description as JSON with weights, and in other formats."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.files import read_config, text_config, write_folder
from outrider.models.heads.formats.base import ImportedHead, TargetInfo
from outrider.models.heads.formats.registry import check_projection, find
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.block import BlockHead
from outrider.models.heads.modules.kv_sharing import KVSharingHead
from outrider.models.heads.modules.parallel import ParallelHead
from outrider.models.heads.weight_checks import Names, check_weights

KEY = "outrider_draft"  # in config.json
WEIGHTS = "model.safetensors"
OWN_FORMAT = "outrider"  # the name of Outrider's own format
HeadModule = AutoregressiveHead | ParallelHead | BlockHead | KVSharingHead

_log = logging.getLogger("outrider")


def make_module(description: HeadDescription) -> HeadModule:
    """Return a module with newly initialized weights."""
    if description.block:
        return BlockHead(description)
    if description.shared_kv:
        return KVSharingHead(description)
    return AutoregressiveHead(description) if description.body else ParallelHead(description)


def is_head(folder: str | Path, target: Callable[[], TargetInfo | None] | None = None) -> bool:
    """Return whether a folder holds a draft head in a known format.

    A full model may include MTP modules. It counts as a draft head if it has the sizes of the
    target, and as a draft model otherwise.

    Args:
        target: returns the target, or None if there is none. It is called only for a full model with MTP modules.

    Raises:
        OutriderError: a file is damaged, or the draft head is of a known kind that is not supported.
    """
    path = Path(folder).expanduser()
    try:
        config = read_config(path)
    except OutriderError:
        return False
    if KEY in config:
        return True
    found = find(path)
    if found is None:
        check_projection(path, alone=True)  # otherwise the folder would be loaded as a draft model
        return False
    if not found.whole():
        return True
    target_info = target() if target else None
    return target_info is not None and found.belongs(target_info)


def import_head(folder: str | Path, target: TargetInfo | None = None) -> ImportedHead:
    """Read a draft head with its weights as they are stored. `load_module` checks whether they fit.

    Raises:
        TargetRequired: the target is needed, but no `target` was given.
        OutriderError: a file is missing or damaged, or the folder holds no supported draft head.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    if KEY in config:
        description = HeadDescription.from_json(config[KEY])
        try:
            stored = load_file(path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise OutriderError(f"{path / WEIGHTS} cannot be read ({error}); copy the draft head again") from error
        weights = {name: _unpacked(value) if value.dtype is torch.uint8 else value for name, value in stored.items()}
        return ImportedHead(description=description, weights=weights, ignored={}, format="Outrider's own")
    found = find(path)
    if found is None:
        check_projection(path)
        raise OutriderError(f"{path} holds no draft head in a known format; see docs/reference/formats.md")
    if text_config(config).get("quantization_config") or config.get("quantization_config"):
        _log.warning("%s: config.json has a quantization_config, but the weights are read as unquantized", path)
    try:
        return found.read(target)
    except OutriderError as error:
        raise type(error)(f"{path}: {error}") from error


def read_head(
    folder: str | Path, *, dtype: torch.dtype, device: torch.device, target: TargetInfo | None = None
) -> HeadModule:
    """Load a draft head.

    Args:
        device: the device of the weights.
        target: the target. Some formats do not store everything and need it.

    Raises:
        OutriderError: a file is missing or truncated, or a weight has another shape or is NaN or infinite.
    """
    trained = import_head(folder, target)
    for reason, names in trained.ignored.items():
        _log.warning("%s: %d tensors are ignored (%s): %s", folder, len(names), reason, names[0])
    module = load_module(trained.description, trained.weights, where=str(folder), stored_name=trained.stored_name)
    return module.to(device=device, dtype=dtype).requires_grad_(False).eval()


def load_module(
    description: HeadDescription,
    weights: Mapping[str, torch.Tensor],
    *,
    where: str,
    stored_name: Callable[[str], str] | None = None,
) -> HeadModule:
    """Return a module with these weights.

    Args:
        weights: exactly the weights that the module has, by name.
        where: a name for the checkpoint in error messages.
        stored_name: returns the name of a weight in the checkpoint, for error messages. None: it is the same.

    Raises:
        OutriderError: a weight is missing, unexpected, of another shape or dtype, or NaN or infinite.
    """
    with torch.device("meta"):
        module = make_module(description)
    check_weights(description, module.state_dict(), weights, Names(where, stored_name or str))
    module.load_state_dict(dict(weights), assign=True)
    if "ids" not in weights:
        module.register_buffer("ids", torch.arange(description.output_vocab), persistent=False)
    return module


def write_head(folder: str | Path, module: HeadModule, *, dtype: torch.dtype, **facts: Any) -> None:
    """Save a draft head. If this fails, the files that were in the folder are unchanged.

    Args:
        folder: the folder, which is created if necessary.
        module: the draft head.
        dtype: the dtype in which the weights are stored.
        facts: further values for config.json.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    weights = {
        name: value.detach().to(dtype) if value.is_floating_point() else _packed(value)
        for name, value in module.state_dict().items()
    }
    config = {"model_type": KEY, KEY: module.description.to_json(), **facts}
    write_folder(Path(folder).expanduser(), config, weights, WEIGHTS)


def _packed(ids: torch.Tensor) -> torch.Tensor:
    """Return token ids [N] as a file has them: ascending ones as a bit for each token, 8 in a byte of uint8."""
    if len(ids) < 2 or not bool((ids[1:] > ids[:-1]).all()):
        return ids
    bits = torch.zeros(int(ids[-1]) // 8 + 1, 8, dtype=torch.uint8)
    bits.view(-1)[ids.cpu().long()] = 1
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the token ids [N] int64 of `_packed`."""
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten().nonzero()[:, 0]
