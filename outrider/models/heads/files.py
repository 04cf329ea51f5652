"""Read and write checkpoint folders: config.json and tensors, which are loaded when they are accessed."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outrider.errors import OutriderError
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.torch.tensor_files import TensorFiles as MappedFiles
from outrider.runtime.mapped_files import INDEX, read_index

# Config keys of models that scale their embeddings.
_EMBEDDING_SCALES = frozenset({"embedding_multiplier", "scale_emb"})
_INDEX_FILES = (INDEX, "pytorch_model.bin.index.json")
# Each of these files has all tensors of its folder.
_COMPLETE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLE_FILES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
Unpacked = tuple[dict[str, Any], Mapping[str, torch.Tensor]]
_read_gguf: Callable[[Path], Unpacked] | None = None
_READ_ERRORS = (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError)


def use_gguf_reader(reader: Callable[[Path], Unpacked]) -> None:
    """Let a function read GGUF files. It returns the config.json and the tensors that a file contains."""
    global _read_gguf
    _read_gguf = reader


def _unpacked(path: Path) -> Unpacked | None:
    """Return the contents of a GGUF file; None for a folder."""
    return _read_gguf(path) if _read_gguf is not None and path.suffix == ".gguf" else None


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint folder, by name. A file is opened when it is needed."""

    def __init__(self, folder: Path) -> None:
        """List the tensors of a folder. Raises OutriderError if a file is missing or damaged."""
        self._folder = folder
        self._opened: dict[Path, Mapping[str, Any]] = {}
        if (unpacked := _unpacked(folder)) is not None:
            self._opened[folder] = unpacked[1]
            self._file_of = dict.fromkeys(unpacked[1], folder)
            return
        self._file_of = self._read_index() or {name: file for file in self._files() for name in self._open(file)}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open(self._file_of[name])[name]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _read_index(self) -> dict[str, Path]:
        """Return the file of each tensor from an index of shards, or {} without an index."""
        for index in (self._folder / name for name in _INDEX_FILES):
            if index.is_file():
                return {name: self._folder / file for name, file in read_index(index).items()}
        return {}

    def _files(self) -> list[Path]:
        """Return the files that hold tensors."""
        for name in _COMPLETE_FILES:
            if (self._folder / name).is_file():
                return [self._folder / name]
        shards = sorted(self._folder.glob("*.safetensors"))
        return shards or [self._folder / name for name in _PICKLE_FILES if (self._folder / name).is_file()]

    def _open(self, file: Path) -> Mapping[str, Any]:
        if file not in self._opened:
            is_safe = file.suffix == ".safetensors"
            self._opened[file] = MappedFiles(file, [file]) if is_safe else _unpickle(file)
        return self._opened[file]


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file that torch.save wrote."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Do not show torch's own message. It advises to execute code from the file.
        raise OutriderError(f"{file} is damaged or does not hold named tensors only; copy it again") from error
    except _READ_ERRORS as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(state, dict) or not all(map(_is_dense, state.values())):
        raise OutriderError(
            f"{file} does not hold named tensors only; give the folder with the weights of the draft head"
        )
    # Tensors share memory if training tied their weights. Copy them, because here they are independent.
    return {str(name): value.clone() for name, value in state.items()}


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder, or the one that a GGUF file contains.

    Raises:
        OutriderError: it is missing or damaged.
    """
    if (unpacked := _unpacked(folder)) is not None:
        return unpacked[0]
    file = folder / "config.json"
    if not folder.is_dir():
        raise OutriderError(f"{folder} is not a folder; give the folder with the config.json of the draft head")
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise OutriderError(f"{folder} holds no config.json; give the folder of a draft head") from error
    except (OSError, ValueError, RecursionError) as error:
        raise OutriderError(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise OutriderError(f"{file} is not a JSON object; copy the checkpoint again")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which may be inside another config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def model_sizes(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return the vocabulary size, the hidden size and the number of layers of a language model, from its config.

    Nemotron-H lists its layers instead of their number. None: the config has no such sizes.
    """
    layers = config.get("num_hidden_layers")
    if layers is None:
        layers = len(config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()) or None
    sizes = config.get("vocab_size"), config.get("hidden_size"), layers
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def read_target_info(folder: str | Path) -> TargetInfo:
    """Return facts about a target from its folder, without loading the model.

    Raises:
        OutriderError: the config cannot be read or is not that of a language model.
    """
    path = Path(folder).expanduser()
    config = read_config(path)
    text = text_config(config)
    sizes = model_sizes(text)
    if sizes is None:
        raise OutriderError(f"{path} holds no language model; give the folder of the target")
    vocab, hidden, layers = sizes
    context = text.get("max_position_embeddings")
    return TargetInfo(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        context=context if isinstance(context, int) else None,
        name=str(folder),
        head=lambda: _read_table(path, "lm_head.weight", "embed_tokens.weight"),
        embedding=lambda: _read_embedding(path, text),
        unused_id=_unused_id(path, vocab),
        layer_types=tuple(text.get("layer_types") or ()),
    )


def read_context(folder: str | Path) -> int | None:
    """Return the number of positions that a model or draft head was made for, by its config; None: unknown."""
    context = text_config(read_config(Path(folder).expanduser())).get("max_position_embeddings")
    return context if isinstance(context, int) and context > 0 else None


def _read_table(path: Path, *endings: str) -> torch.Tensor:
    """Return a table [V, H] of a target. Its name ends in the first of `endings` that exists: tables may be tied."""
    tensors = TensorFiles(path)
    for ending in endings:
        for name in tensors:
            if name == ending or name.endswith(f".{ending}"):
                return tensors[name]
    raise OutriderError(f"{path} holds no tensor {' or '.join(endings)}; give the folder of the target")


def _read_embedding(path: Path, text: Mapping[str, Any]) -> torch.Tensor:
    """Return the embedding [V, H] of a target."""
    if "gemma" in str(text.get("model_type")) or _EMBEDDING_SCALES & text.keys():
        raise OutriderError(
            f"{path} scales its embeddings, which is not supported here; use the draft head with draft:DIR"
        )
    return _read_table(path, "embed_tokens.weight")


def _unused_id(path: Path, vocab: int) -> int | None:
    """Return the first id of the embedding after all ids of the tokenizer; None: there is none."""
    try:
        tokenizer = json.loads((path / "tokenizer.json").read_text("utf-8"))
        ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
        first = max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return first if first < vocab else None


def save_tensors(state: Mapping[str, Any], file: Path) -> None:
    """Write a file for `torch.load`. Raise OSError if the disk is full, where torch raises a RuntimeError."""
    try:
        with file.open("wb") as out:
            torch.save(state, out)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def replace_tensors(state: Mapping[str, Any], file: Path) -> None:
    """Write a file for `torch.load`, and its folder if necessary. If this fails, an existing file stays intact.

    Raises:
        OSError, RuntimeError: the disk is full, or the file cannot be written.
    """
    temporary = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(state, temporary)
        temporary.replace(file)
    except (OSError, RuntimeError):
        with suppress(OSError):
            temporary.unlink()
        raise


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str) -> None:
    """Write a checkpoint. If this fails, the files that were in the folder are unchanged.

    Args:
        folder: the folder, which is created if necessary.
        config: the contents of config.json.
        tensors: the tensors, by name.
        file: the name of the file for the tensors. Its suffix decides the file format.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    contiguous = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new_tensors = folder / f"{file}.new"
        new_config = folder / "config.json.new"
        if file.endswith(".safetensors"):
            save_file(contiguous, new_tensors, metadata={"format": "pt"})
        else:
            save_tensors(contiguous, new_tensors)
        new_config.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        # safetensors makes its files readable by the owner only. Use the default permissions.
        shutil.copymode(new_config, new_tensors)
        for new_file in (new_tensors, new_config):
            new_file.replace(new_file.with_suffix(""))
    except (OSError, RuntimeError, SafetensorError) as error:
        for new_file in folder.glob("*.new"):
            new_file.unlink(missing_ok=True)
        raise OutriderError(f"{folder} cannot be written ({error}); free some space, or give another folder") from error
