"""The command `convert`: write a draft head in another format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.files import read_target_info, write_folder
from outrider.models.heads.formats.base import Config, ImportedHead, TargetInfo, Tensors
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.store import KEY, OWN_FORMAT, WEIGHTS, import_head, load_module
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.hub.names import hub_name
from outrider.runtime.atomic_files import check_folder
from outrider.runtime.report.console import print_plain


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
    format = None if to == OWN_FORMAT else format_of(to)
    path = empty_folder(out)
    target_info = find_target_info(target) if target else None
    head = checked(model_folder(folder), target_info)
    if format is None:
        config: Config = {"model_type": KEY, KEY: head.description.to_json()}
        tensors = head.weights
        file = WEIGHTS
    else:
        config, tensors = format.write(head.description, head.weights, target_info)
        config = {**config, "torch_dtype": _dtype(tensors)}
        file = format.file
    write_folder(path, config, tensors, file)
    converted = checked(path, target_info or _target_info(head.description))
    _print_result(head, converted, out, console)
    return {
        "from": head.format,
        "to": converted.format,
        "out": out,
        "tensors": len(tensors),
        "ignored": {reason: list(names) for reason, names in head.ignored.items()},
        "description": converted.description.to_json(),
    }


def empty_folder(out: str) -> Path:
    """Return the folder of `--out`. Raises OutriderError if it has files, or cannot be created or written to."""
    check_folder(out, "--out")
    path = Path(out).expanduser()
    if path.exists() and any(path.iterdir()):
        raise OutriderError(f"{out} exists and is not empty; give a new or empty folder")
    return path


def find_target_info(target: str) -> TargetInfo:
    """Return the sizes and tables of a target. A table of a target on the Hub is fetched when it is read.

    Raises:
        OutriderError: there is no such target.
    """
    info = read_target_info(model_folder(target, weights=False))
    if hub_name(target) is None:
        return info
    return replace(info, name=target, head=lambda: _whole(target).head(), embedding=lambda: _whole(target).embedding())


def _whole(target: str) -> Any:
    return read_target_info(model_folder(target))


def checked(folder: str | Path, target: TargetInfo | None) -> ImportedHead:
    """Read a draft head and check its weights.

    Args:
        folder: the folder of the draft head.
        target: the sizes of the target; None: do not compare them.

    Raises:
        OutriderError: the head cannot be read, its weights do not fit, or it belongs to another target.
    """
    head = import_head(folder, target)
    load_module(head.description, head.weights, where=str(folder), stored_name=head.stored_name)
    description = head.description
    sizes = (description.vocab, description.target_hidden, description.target_layers)
    if target and sizes != (target.vocab, target.hidden, target.layers):
        raise OutriderError(
            f"{folder} was trained on a target with vocabulary {sizes[0]}, width {sizes[1]} and {sizes[2]} layers, and"
            f" the given target has {target.vocab}, {target.hidden} and {target.layers}; give the target of the head"
        )
    return head


def _target_info(description: HeadDescription) -> TargetInfo:
    """Return the sizes of the target, as the draft head states them."""
    return TargetInfo(vocab=description.vocab, hidden=description.target_hidden, layers=description.target_layers)


def _dtype(tensors: Tensors) -> str:
    """Return the dtype of most of the weights."""
    counts: dict[torch.dtype, int] = {}
    for value in tensors.values():
        if value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")


def _print_result(head: ImportedHead, converted: ImportedHead, out: str, console: Console) -> None:
    print_plain(console, f"{out}: converted from {head.format} to {converted.format}, and read back")
    for reason, names in head.ignored.items():
        print_plain(console, f"{len(names)} tensors were ignored ({reason}), such as {names[0]}")
    if converted.description != head.description:
        differences = ", ".join(changes(head.description, converted.description))
        print_plain(console, f"the new format describes the head differently: {differences}")


def changes(before: HeadDescription, after: HeadDescription) -> list[str]:
    """Return the fields in which two descriptions differ."""
    old = before.to_json()
    new = after.to_json()
    fields: Config = {}
    for name in old:
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            fields |= {f"{name}.{key}": (old[name][key], new[name][key]) for key in old[name]}
        else:
            fields[name] = (old[name], new[name])
    return [f"{name} was {was} and is {now}" for name, (was, now) in fields.items() if was != now]
