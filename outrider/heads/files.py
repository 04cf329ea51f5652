"""Folders of checkpoints: which tensors there are, at once; what they hold, when it is asked for."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.errors import OutriderError
from outrider.heads.formats.base import TargetInfo

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")  # of a language model, in its config

_SCALES = frozenset({"embedding_multiplier", "scale_emb"})  # in configs of models whose tables are not what is read
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "medusa_lm_head.safetensors")  # where one of them lies, it is all there is
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
_BROKEN = (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a folder, by their names; each is read when it is taken."""

    def __init__(self, folder: Path) -> None:
        """Find out what there is.

        Raises:
            OutriderError: a file is missing or damaged.
        """
        self._folder = folder
        self._unpickled: dict[Path, dict[str, torch.Tensor]] = {}
        self._where = self._indexed() or {name: file for file in self._files() for name in self._names(file)}

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._where[name]
        if file.suffix != ".safetensors":
            return self._unpickle(file)[name]
        with _reading(file), safe_open(file, "pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def _indexed(self) -> dict[str, Path]:
        """By an index of shards, if there is one."""
        for index in (self._folder / name for name in _INDEXES):
            if index.is_file():
                with _reading(index):
                    found = json.loads(index.read_text("utf-8"))["weight_map"]
                    return {str(name): self._folder / file for name, file in found.items()}
        return {}

    def _files(self) -> list[Path]:
        for name in _WHOLE:
            if (self._folder / name).is_file():
                return [self._folder / name]
        shards = sorted(self._folder.glob("*.safetensors"))
        return shards or [self._folder / name for name in _PICKLED if (self._folder / name).is_file()]

    def _names(self, file: Path) -> list[str]:
        if file.suffix != ".safetensors":
            return list(self._unpickle(file))
        with _reading(file), safe_open(file, "pt") as opened:
            return list(opened.keys())

    def _unpickle(self, file: Path) -> dict[str, torch.Tensor]:
        if file not in self._unpickled:
            with _reading(file):
                found = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(found, dict) or not all(map(_is_plain, found.values())):
                raise OutriderError(f"{file} holds something else than named tensors; give the draft's weights")
            # Blocks that a training shared between layers lie in one memory here, and will be weights of their own.
            self._unpickled[file] = {str(name): value.clone() for name, value in found.items()}
        return self._unpickled[file]


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers are all there."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:  # whose own message tells people to run what the file says
        raise OutriderError(f"{file} is damaged, or holds something else than named tensors; copy it again") from error
    except _BROKEN as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the checkpoint again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        OutriderError: it is missing or damaged.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise OutriderError(f"{folder} is not a folder; give the folder that holds the draft's config.json")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise OutriderError(f"{file} is no JSON object; copy the checkpoint again")
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that its language model has, where it sees or hears, too."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else config


def read_target_info(folder: str | Path) -> TargetInfo:
    """What a target's folder says of it, without loading the model.

    Raises:
        OutriderError: it cannot be read, or holds no language model.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    text = text_config(config)
    sizes = [size for name in SIZES if isinstance(size := text.get(name), int)]
    if len(sizes) < len(SIZES):
        raise OutriderError(f"{path} holds no language model; give the folder of the draft's target")
    context = text.get("max_position_embeddings")
    return TargetInfo(
        vocab=sizes[0],
        hidden=sizes[1],
        layers=sizes[2],
        context=context if isinstance(context, int) else None,
        name=str(folder),
        head=lambda: _table(path, "lm_head.weight", "embed_tokens.weight"),
        embedding=lambda: _embedding(path, text),
        spare=_spare(path, sizes[0]),
        kinds=tuple(text.get("layer_types") or ()),
    )


def _table(path: Path, *endings: str) -> torch.Tensor:
    """A target's table [V, H], by the first of these names that there is: its two tables may be one."""
    stored = TensorFiles(path)
    for ending in endings:
        for name in stored:
            if name == ending or name.endswith(f".{ending}"):
                return stored[name]
    raise OutriderError(f"{path} holds neither {' nor '.join(endings)}; give the folder of the draft's target")


def _embedding(path: Path, text: Mapping[str, Any]) -> torch.Tensor:
    if "gemma" in str(text.get("model_type")) or _SCALES & text.keys():
        raise OutriderError(f"{path} scales its embeddings, which is not handled here; use the draft with draft:DIR")
    return _table(path, "embed_tokens.weight")


def _spare(path: Path, vocab: int) -> int | None:
    """The first row of a target's tables that its tokenizer has no token for, if there is one."""
    try:
        found = json.loads((path / "tokenizer.json").read_text("utf-8"))
        ids = [*found["model"]["vocab"].values(), *(token["id"] for token in found["added_tokens"])]
        first = max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return first if first < vocab else None


def save_tensors(state: Mapping[str, Any], file: Path) -> None:
    """What `torch.load` reads; raises OSError where the disk is full, of which torch says how far it got instead."""
    try:
        with file.open("wb") as out:
            torch.save(state, out)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str) -> None:
    """Write a checkpoint. What lay there survives a failure.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    whole = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{file}.new", folder / "config.json.new"
        if file.endswith(".safetensors"):
            save_file(whole, fresh[0], metadata={"format": "pt"})
        else:
            save_tensors(whole, fresh[0])
        fresh[1].write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        shutil.copymode(fresh[1], fresh[0])  # safetensors lets nobody but the owner read what it writes
        for each in fresh:
            each.replace(each.with_suffix(""))
    except (OSError, RuntimeError, SafetensorError) as error:
        for each in folder.glob("*.new"):
            each.unlink(missing_ok=True)
        raise OutriderError(f"{folder} cannot be written ({error}); free some space, or give another folder") from error
