"""The command `convert`: write a draft head in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.errors import OutriderError
from outrider.heads.description import HeadDescription
from outrider.heads.files import read_target_info, write_folder
from outrider.heads.formats.base import Config, TargetInfo, Tensors, Trained
from outrider.heads.formats.registry import format_of
from outrider.heads.store import KEY, OWN, WEIGHTS, filled, read_trained
from outrider.loader.embedded import model_folder
from outrider.system.atomic_files import check_folder


def run_convert(folder: str, *, to: str, out: str, target: str | None, console: Console) -> dict[str, Any]:
    """Read a draft head, write it in another format, and read the result.

    Args:
        folder: the folder of the draft head.
        to: the name of the format.
        out: an empty or new folder.
        target: the folder of the target, if a format needs it.
        console: the console for messages.

    Returns:
        A summary as JSON values.

    Raises:
        OutriderError: the draft is damaged, or the format cannot represent it. Nothing is written then.
    """
    format = None if to == OWN else format_of(to)
    path = Path(out).expanduser()
    check_folder(out, "--out")
    if path.exists() and any(path.iterdir()):
        raise OutriderError(f"{out} is there already; give a folder that is empty or new")
    partner = read_target_info(model_folder(target)) if target else None
    found = checked(model_folder(folder), partner)
    if format is None:
        config, tensors, file = {"model_type": KEY, KEY: found.description.to_json()}, found.weights, WEIGHTS
    else:
        config, tensors = format.write(found.description, found.weights, partner)
        config, file = {**config, "torch_dtype": _dtype(tensors)}, format.file
    write_folder(path, config, tensors, file)
    again = checked(path, partner or _partner(found.description))
    _tell(found, again, out, console)
    return {
        "from": found.format,
        "to": again.format,
        "out": out,
        "tensors": len(tensors),
        "left_aside": {why: list(names) for why, names in found.ignored.items()},
        "description": again.description.to_json(),
    }


def checked(folder: str | Path, partner: TargetInfo | None) -> Trained:
    """Read a draft head and check its weights.

    Raises:
        OutriderError: it cannot be read, its weights do not fit, or it belongs to another target.
    """
    found = read_trained(folder, partner)
    filled(found.description, found.weights, where=str(folder))
    it = found.description
    sizes = it.vocab, it.target_hidden, it.target_layers
    if partner and sizes != (partner.vocab, partner.hidden, partner.layers):
        raise OutriderError(
            f"{folder} was trained on a target with vocabulary {sizes[0]}, width {sizes[1]} and {sizes[2]} layers; the"
            f" one given has {partner.vocab}, {partner.hidden} and {partner.layers}, so give the one it belongs to"
        )
    return found


def _partner(it: HeadDescription) -> TargetInfo:
    """Return the facts of a target that its draft head states."""
    return TargetInfo(vocab=it.vocab, hidden=it.target_hidden, layers=it.target_layers)


def _dtype(tensors: Tensors) -> str:
    """Return the dtype of most of the weights."""
    counts: dict[torch.dtype, int] = {}
    for value in tensors.values():
        if value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")


def _tell(found: Trained, again: Trained, out: str, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{out}: {again.format}, from {found.format}; written and read again")
    for why, names in found.ignored.items():
        say(f"{len(names)} tensors were left aside ({why}): {names[0]}")
    if again.description != found.description:
        say("the new folder says the same in other terms: " + ", ".join(_changed(found.description, again.description)))


def _changed(one: HeadDescription, two: HeadDescription) -> list[str]:
    """Return the fields in which two descriptions differ."""
    left, right = one.to_json(), two.to_json()
    parts: Config = {}
    for name in left:
        if isinstance(left[name], dict) and isinstance(right[name], dict):
            parts |= {f"{name}.{key}": (left[name][key], right[name][key]) for key in left[name]}
        else:
            parts[name] = left[name], right[name]
    return [f"{name} was {was} and is {now}" for name, (was, now) in parts.items() if was != now]
