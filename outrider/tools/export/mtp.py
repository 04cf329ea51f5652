"""Writes an MTP module into a copy of its target's checkpoint, where other engines look for it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError
from outrider.models.heads.files import read_config, read_target_info, text_config
from outrider.models.heads.formats.base import Config, Tensors
from outrider.models.heads.formats.registry import format_of
from outrider.tools.convert import changes, checked

_INDEX = "model.safetensors.index.json"
_OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of a model family hold a module."""

    layout: str  # the format of draft heads with its names
    prefix: str  # of the module's tensors
    count: str  # key of config.json for the number of modules


_QWEN = Family(layout="mtp-qwen", prefix="mtp.", count="mtp_num_hidden_layers")
# Families whose modules have a dense layer, by the architecture in the config of the target.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MiMoForCausalLM": Family(layout="mtp-mimo", prefix="model.mtp_layers.", count="num_nextn_predict_layers"),
        "Qwen3_5ForCausalLM": _QWEN,
        "Qwen3_5ForConditionalGeneration": _QWEN,
    }
)


def architecture_of(target: Path) -> str:
    """Return the architecture by which engines choose the code of a model; "": the config names none.

    Raises:
        OutriderError: the config cannot be read.
    """
    architectures = read_config(target).get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def write_in_target(source: Path, target: Path, written: Path) -> None:
    """Write the checkpoint of a target with a module in place of its own one.

    Args:
        source: the folder of the module.
        target: the folder of the target, of an architecture in `FAMILIES`, in safetensors.
        written: the folder to write.

    Raises:
        OutriderError: the module does not belong to the target, modules of its family are
            different, or a file cannot be read or written.
    """
    family = FAMILIES[architecture_of(target)]
    info = read_target_info(target)
    head = checked(source, info)
    _, tensors = format_of(family.layout).write(head.description, head.weights, info)
    shards = sorted(target.glob("*.safetensors"))
    if not shards:
        raise OutriderError(f"{target} has no safetensors files; give the target in safetensors")
    try:
        written.mkdir(parents=True)
        for pattern in _OTHER_FILES:
            for file in target.glob(pattern):
                shutil.copyfile(file, written / file.name)
        _write_config(written, family)
        for shard in shards:
            _write_shard(shard, written / shard.name, family, tensors if shard is shards[-1] else {})
        if (written / _INDEX).is_file():
            _write_index(written / _INDEX, family, tensors, shards[-1].name)
    except (OSError, SafetensorError) as error:
        raise OutriderError(
            f"{written} cannot be written ({error}); free some space, or copy the target again"
        ) from error
    read_back = checked(written, info).description
    if read_back != head.description:
        differences = "; ".join(changes(head.description, read_back))
        raise OutriderError(
            f"{source} was trained for a different layer configuration ({differences}), and other"
            f" engines would load it wrongly; train it for {target}"
        )


def _write_config(folder: Path, family: Family) -> None:
    config: Config = read_config(folder)
    text = text_config(config)
    changed = {**text, family.count: 1}
    config = changed if text is config else {**config, "text_config": changed}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _write_shard(shard: Path, written: Path, family: Family, added: Tensors) -> None:
    """Copy a file of tensors without the target's own module, and with added tensors."""
    with safe_open(shard, "pt") as tensors:
        has_module = any(name.startswith(family.prefix) for name in tensors.keys())  # noqa: SIM118
    if not has_module and not added:
        shutil.copyfile(shard, written)
        return
    kept = {name: value for name, value in load_file(shard).items() if not name.startswith(family.prefix)}
    save_file(kept | {name: value.contiguous() for name, value in added.items()}, written, metadata={"format": "pt"})
    shutil.copymode(shard, written)


def _write_index(index: Path, family: Family, tensors: Tensors, file: str) -> None:
    content = json.loads(index.read_text("utf-8"))
    kept = {name: shard for name, shard in content["weight_map"].items() if not name.startswith(family.prefix)}
    content["weight_map"] = kept | dict.fromkeys(tensors, file)
    index.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
