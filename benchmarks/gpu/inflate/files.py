"""Inflate from folder to folder, weight by weight."""

from __future__ import annotations

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
_BESIDE = frozenset({".json", ".jinja", ".txt", ".model"})  # of the tokenizer and of generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflated:
    """What was written."""

    config: LlamaConfig
    parameters: int
    zeros: int  # of the parameters
    bytes: int
    files: int  # of weights


def inflate_folder(
    source: Path, out: Path, dims: Dims, *, seed: int = 0, dtype: torch.dtype | None = None, shard: int = _SHARD
) -> Inflated:
    """Write the inflated model of a folder to another, with all that lies beside the weights.

    No more than one shard and one matrix are held in memory.

    Args:
        source: folder of a Llama, with safetensors.
        out: folder to make.
        dims: of the large model.
        seed: of what is random.
        dtype: precision to write; the small model's unless given.
        shard: bytes of weights after which a file is closed.

    Raises:
        OutriderError: the folders or the dimensions are not fit; the message says why.
    """
    small = _read_config(source)
    large = inflate_config(small, dims, dtype=dtype)
    if out.exists() and any(out.iterdir()):
        raise OutriderError(f"{out} is not empty; give a new folder")
    weights = _Weights(source)
    out.mkdir(parents=True, exist_ok=True)
    written = _write(out, inflate_tensors(small, large, weights.read, seed=seed), shard)
    for file in source.iterdir():
        if file.suffix in _BESIDE and file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    large.save_pretrained(out)
    for file in out.glob("*.safetensors"):
        shutil.copymode(out / "config.json", file)  # safetensors lets nobody but the owner read what it writes
    return Inflated(config=large, **written)


class _Weights:
    """Weights of a folder by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._file: dict[str, Path] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._file |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise OutriderError(
                f"the weights in {folder} cannot be read ({error}); copy the checkpoint again"
            ) from error
        if not self._file:
            raise OutriderError(f"{folder} holds no .safetensors; write the weights there with save_pretrained")

    def read(self, name: str) -> Tensor:
        if name not in self._file:
            raise OutriderError(f"the checkpoint lacks {name}; copy it again")
        with safe_open(self._file[name], framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
            return weight


def _read_config(folder: Path) -> LlamaConfig:
    try:
        kind = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except (OSError, ValueError) as error:
        raise OutriderError(f"{folder} holds no config.json that can be read; give the folder of a model") from error
    if kind != "llama":
        raise OutriderError(f"{folder} holds a model of type {kind}; only llama can be inflated")
    return LlamaConfig.from_pretrained(folder, local_files_only=True)


def _write(out: Path, tensors: Iterator[tuple[str, Tensor]], shard: int) -> dict[str, int]:
    held: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    parameters = zeros = size = 0

    def close() -> None:
        save_file(held, out / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, weight in tensors:
        if held and sum(other.nbytes for other in held.values()) + weight.nbytes > shard:
            close()
        held[name] = weight
        parameters, size = parameters + weight.numel(), size + weight.nbytes
        zeros += weight.numel() - int(weight.count_nonzero())
    close()
    _name(out, shards, size)
    return {"parameters": parameters, "zeros": zeros, "bytes": size, "files": len(shards)}


def _name(out: Path, shards: Sequence[Sequence[str]], size: int) -> None:
    """Give files the names that transformers looks for, which say how many there are."""
    if len(shards) == 1:
        (out / "0.part").rename(out / "model.safetensors")
        return
    place: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (out / f"{i}.part").rename(out / file)
        place |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": size}, "weight_map": place}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
