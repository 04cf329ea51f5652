"""Inflates the model of one folder into another folder, weight by weight."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from inflate.model import Dims, inflate_config, inflate_tensors
from outrider.errors import OutriderError

_SHARD = 2 << 30  # bytes
_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})  # files of the tokenizer and of generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflated:
    """The written model."""

    config: LlamaConfig
    parameters: int
    zeros: int  # parameters that are 0
    bytes: int
    files: int  # with weights


def inflate_folder(
    source: Path, out: Path, dims: Dims, *, seed: int = 0, dtype: torch.dtype | None = None, shard: int = _SHARD
) -> Inflated:
    """Inflate the model of a folder into another folder, and copy its other files.

    At most one shard and one matrix are in memory at a time.

    Args:
        source: folder of a Llama with safetensors files.
        out: new folder.
        dims: dimensions of the large model.
        seed: of random weights.
        dtype: precision to write; None: that of the small model.
        shard: bytes of weights after which a new file begins.

    Raises:
        OutriderError: a folder or the dimensions are unsuitable.
    """
    small = _read_config(source)
    large = inflate_config(small, dims, dtype=dtype)
    if out.exists() and any(out.iterdir()):
        raise OutriderError(f"{out} is not empty; give a new folder")
    weights = _Weights(source)
    out.mkdir(parents=True, exist_ok=True)
    written = _write(out, inflate_tensors(small, large, weights.read, seed=seed), shard)
    for file in source.iterdir():
        if file.suffix in _COPIED_SUFFIXES and file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    large.save_pretrained(out)
    for file in out.glob("*.safetensors"):
        # safetensors writes files that only the owner can read.
        shutil.copymode(out / "config.json", file)
    return Inflated(config=large, **written)


def inflate_to(
    device: torch.device, source: Path, dims: Dims, *, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Inflate the model of a folder into memory, on a device. Arguments and errors are those of `inflate_folder`.

    Returns:
        The configuration, and the weights by name.
    """
    small = _read_config(source)
    large = inflate_config(small, dims, dtype=dtype)
    stored = _Weights(source)
    return large, dict(inflate_tensors(small, large, lambda name: stored.read(name).to(device), seed=seed))


class _Weights:
    """The weights of a folder by name. They are read on demand."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise OutriderError(
                f"the weights in {folder} cannot be read ({error}); copy the checkpoint again"
            ) from error
        if not self._files:
            raise OutriderError(f"{folder} has no .safetensors; write the weights there with save_pretrained")

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise OutriderError(f"the checkpoint lacks {name}; copy it again")
        with safe_open(self._files[name], framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
            return weight


def _read_config(folder: Path) -> LlamaConfig:
    try:
        model_type = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except (OSError, ValueError) as error:
        raise OutriderError(f"{folder} has no config.json that can be read; give the folder of a model") from error
    if model_type != "llama":
        raise OutriderError(f"{folder} has a model of type {model_type}; only llama can be inflated")
    return LlamaConfig.from_pretrained(folder, local_files_only=True)


def _write(out: Path, tensors: Iterator[tuple[str, Tensor]], shard: int) -> dict[str, int]:
    """Write the weights in shards. Return the counts of `Inflated`."""
    pending: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    parameters = 0
    zeros = 0
    size = 0

    def write_shard() -> None:
        save_file(pending, out / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, weight in tensors:
        if pending and sum(other.nbytes for other in pending.values()) + weight.nbytes > shard:
            write_shard()
        pending[name] = weight
        parameters += weight.numel()
        size += weight.nbytes
        zeros += weight.numel() - int(weight.count_nonzero())
    write_shard()
    _rename_shards(out, shards, size)
    return {"parameters": parameters, "zeros": zeros, "bytes": size, "files": len(shards)}


def _rename_shards(out: Path, shards: Sequence[Sequence[str]], size: int) -> None:
    """Give the files the names that transformers expects. They contain the number of files."""
    if len(shards) == 1:
        (out / "0.part").rename(out / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (out / f"{i}.part").rename(out / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
