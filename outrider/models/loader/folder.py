"""Check the files of a model folder, and name the fix where they are no checkpoint that can be loaded."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.errors import OutriderError
from outrider.models.loader.embedded import check_is_folder
from outrider.models.loader.gguf.file import parts_of
from outrider.runtime.mapped_files import INDEX, read_index

_POINTER = b"version https://git-lfs"
_PART = re.compile(r".*-\d+-of-\d+\.safetensors")
# Architectures of transformers that write no text, from checkpoints whose model_type also has a language model.
_OTHER_HEADS = re.compile(r".*For(\w*Classification|QuestionAnswering|MultipleChoice|\w*Reward\w*)")
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
# The kinds of folders without config.json, by the file that shows the kind.
_NO_MODELS = {
    "adapter_config.json": "a PEFT adapter and no model; merge it with merge_and_unload(), and give the folder in which"
    " save_pretrained writes the result",
    "model_index.json": "a pipeline of diffusers and no language model; give the folder of a text model",
    "params.json": "a checkpoint of its publisher's own format; give the folder of its Hugging Face version",
}
# The contents of a folder without safetensors, by the ending of the file.
_OTHER_WEIGHTS = {
    ".bin": "weights as {name}, which may run code when they are read; write safetensors with"
    " AutoModelForCausalLM.from_pretrained and save_pretrained of transformers",
    ".pth": "weights as {name}, which may run code when they are read; give the folder of its Hugging Face version",
    ".onnx": "an ONNX model, {name}; give the folder of the checkpoint that it was exported from",
}


def check_folder(path: Path) -> None:
    """Check that a folder is there, that its files can be read, and that it has a config.json.

    Raises:
        OutriderError: it is no model folder. The message says what it is.
    """
    check_is_folder(path)
    files = list(_readable(path))
    if path / "config.json" in files:
        return
    for name, what in _NO_MODELS.items():
        if path / name in files:
            raise OutriderError(f"{path} holds {what}")
    _refuse_gguf(path)
    raise OutriderError(f"{path} holds no config.json; give the folder of a Hugging Face model")


def _readable(path: Path) -> Iterator[Path]:
    """Return the JSON files and weights of a folder. Raise if one cannot be read, or is a pointer of git-lfs."""
    try:
        for file in sorted(path.iterdir()):
            if file.suffix in (".json", ".safetensors") and file.is_file():
                with file.open("rb") as opened:
                    beginning = opened.read(len(_POINTER))
                if beginning == _POINTER:
                    raise OutriderError(
                        f"{file} is a pointer of git-lfs and not the file itself; run git lfs pull in {path}"
                    )
                yield file
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> OutriderError:
    reason = error.strerror or one_line(error)
    return OutriderError(f"{error.filename or path} cannot be read ({reason}); change its permissions")


def _refuse_gguf(path: Path) -> None:
    """Raise if a folder holds GGUF files in place of a checkpoint."""
    if files := sorted({str(parts_of(file)[0]) for file in path.glob("*.gguf")}):
        which = "the file itself" if len(files) == 1 else "one of them"
        raise OutriderError(f"{path} holds GGUF files; give {which}, {' or '.join(files[:3])}")


def check_config(path: Path, config: Any) -> None:
    """Check what a configuration of transformers says of the model.

    Raises:
        OutriderError: the model writes no text, or has a size of zero.
    """
    heads = getattr(config, "architectures", None) or ()
    if heads and all(_OTHER_HEADS.fullmatch(str(head)) for head in heads):
        raise OutriderError(
            f"{path / 'config.json'} describes a {heads[0]}, which writes no text; give a text model that generates"
        )
    text = config.get_text_config(decoder=True).to_dict()  # an attribute may be refused that differs between layers
    for name in _SIZES:
        if isinstance(size := text.get(name), int) and size < 1:
            raise OutriderError(f"{path / 'config.json'} has {name} {size}; copy the checkpoint again")


def check_weights(path: Path, config: Any) -> None:
    """Check that a folder has all files of its weights, in a format that transformers reads.

    Raises:
        OutriderError: a file is missing, or the weights have another format.
    """
    if getattr(config, "quantization", None):
        raise OutriderError(
            f"the weights in {path} are quantized for MLX; give the folder of the original checkpoint, or a GGUF file"
        )
    weights = {file.name for file in path.glob("*.safetensors")}
    if not weights:
        _refuse_other_weights(path)
    used = {"model.safetensors"} & weights or weights
    if (path / INDEX).is_file():
        used = set(read_index(path / INDEX).values())
        if missing := sorted(used - weights):
            raise OutriderError(f"{path} lacks {', '.join(missing[:3])}, which {INDEX} names; copy the missing files")
    elif "model.safetensors" not in weights and all(map(_PART.fullmatch, weights)):
        raise OutriderError(f"{path} lacks {INDEX}, which says where each weight is; copy it as well")
    for name in sorted(used):
        _check_whole(path / name)


def _check_whole(file: Path) -> None:
    """Raise if the header of a file of safetensors, which says how long the file is, does not fit it."""
    try:
        with safe_open(file, "np"):  # which needs no torch
            pass
    except SafetensorError as error:
        raise OutriderError(f"{file} is damaged or truncated ({one_line(error)}); copy or download it again") from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _refuse_other_weights(path: Path) -> None:
    """Raise for a folder without safetensors. The message names the weights that it has instead."""
    _refuse_gguf(path)
    for suffix, what in _OTHER_WEIGHTS.items():
        if file := next(_of_suffix(path, suffix), None):
            raise OutriderError(f"{path} holds no .safetensors, but {what.format(name=file.relative_to(path))}")
    raise OutriderError(f"{path} holds no .safetensors; write the weights there with save_pretrained")


def _of_suffix(path: Path, suffix: str) -> Iterator[Path]:
    places: Iterable[Path] = (*path.iterdir(), *path.glob("onnx/*"))
    return (file for file in sorted(places) if file.suffix == suffix and file.name != "training_args.bin")


def lacking(path: Path, config: Any, missing: Sequence[str]) -> OutriderError:
    """Return the error for weights that lack tensors."""
    heads = list(map(str, getattr(config, "architectures", None) or ()))
    bare = next((head for head in heads if head.endswith("Model") and "LMHead" not in head), None)
    fix = f"as a {bare} does; give a model that generates text" if bare else "copy the checkpoint again"
    return OutriderError(f"the weights in {path} lack {', '.join(missing[:3])}{',' if bare else ';'} {fix}")


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__
