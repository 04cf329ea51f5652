"""Find smaller models with the tokenizer of a target: the other members of its family."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from outrider.core.config import FULL_BITS, QUANTIZE_BITS
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.models.loader.folder import check_folder, check_weights
from outrider.models.loader.gguf.file import parts_of, read_gguf
from outrider.models.loader.gguf.tokenizer import load_tokenizer
from outrider.models.loader.load import read_model_config
from outrider.models.loader.paths import GGUF_SUFFIX, is_gguf
from outrider.models.loader.tokenizer import read_tokenizer
from outrider.models.loader.weight_shapes import weight_shapes
from outrider.runtime.grouping import group_by

HUB = "hub"  # names the cache of the Hugging Face Hub
_HEAD, _GGUF_HEAD, _GGUF_NORM = "lm_head.weight", "output.weight", "output_norm.weight"
_EIGHT_BITS = 6.2  # the fewest bits of a GGUF type, such as Q6_K, that count as 8
_SMALLER = 0.9  # largest share of the target's parameters; a copy of the target in another format has about 1


class Family(NamedTuple):
    """The models in some folders, by whether they can draft for a target."""

    smaller: tuple[Path, ...]  # with the tokenizer of the target, the smallest one first
    left_out: dict[Path, str]  # the others, and why
    stored: dict[Path, frozenset[str]]  # by file with full weights: the `draft_quantize` that another of its model has
    models: dict[Path, Path]  # by file: the first file of its model

    @property
    def reasons(self) -> list[str]:
        """One line for each reason, with the names of the models."""
        names: dict[str, list[str]] = {}
        for path, reason in self.left_out.items():
            names.setdefault(reason, []).append(path.name)
        return [f"left out, {reason}: {', '.join(each)}" for reason, each in names.items()]


def find_smaller(target: Path, places: Sequence[str]) -> Family:
    """Find the smaller models with the tokenizer of a target.

    Of several GGUF files of one model with about as many bits, 16, 8 or 4, the one that is nearest to this stays.

    Args:
        target: a folder or a GGUF file.
        places: folders to search, with the folders in them; `hub` is the cache of the Hub. Nothing is downloaded.

    Raises:
        OutriderError: a place is no folder, or there is no such model.
    """
    most = _SMALLER * count_parameters(target)
    tokenizer = _tokenizer(target)
    sizes: dict[Path, int] = {}
    left_out: dict[Path, str] = {}
    for path in (path for place in places for path in _models(_folder(place)) if not path.samefile(target)):
        try:
            sizes[path] = count_parameters(path)
            if not _has_vocabulary(path, tokenizer):
                left_out[path] = "with another tokenizer"
            elif sizes[path] > most:
                left_out[path] = f"with more than {_SMALLER:.0%} of the target's parameters"
        except OutriderError as error:
            left_out[path] = f"as it cannot be read ({error})"
    found: dict[str, Path] = {}  # by contents: the cache may hold several revisions of one model
    for path in sorted(sizes.keys() - left_out.keys(), key=lambda path: (sizes[path], path)):
        found.setdefault(model_fingerprint(path), path)
    models = group_by(found.values(), _identity)
    stored = _one_file_for_each_width(models.values(), left_out)
    smaller = tuple(path for path in found.values() if path not in left_out)
    family = Family(smaller, left_out, stored, {file: files[0] for files in models.values() for file in files})
    if not found:
        raise OutriderError(
            f"no model in {', '.join(places)} is smaller than {target} and has its tokenizer; name other folders, or"
            f" leave --family out. {'; '.join(family.reasons)}".removesuffix(". ")
        )
    return family


def count_parameters(path: Path) -> int:
    """Return the number of weights of a model without its LM head, from its configuration or the headers of its files.

    Some formats store a tied LM head and others do not. Without it, copies of one model count as equally large.

    Raises:
        OutriderError: it is no model, or a file is missing or damaged.
    """
    if is_gguf(path):
        return sum(prod(tensor.shape) for name, tensor in read_gguf(path).tensors.items() if name != _GGUF_HEAD)
    check_folder(path)
    config = read_model_config(path)
    check_weights(path, config)
    text = config.get_text_config(decoder=True)
    try:
        shapes = weight_shapes(text)
    except UnsupportedModel:
        return sum(map(_stored_values, path.glob("*.safetensors")))
    return sum(prod(shape) for name, shape in shapes.items() if name != _HEAD)


def _stored_values(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        names = [name for name in tensors.keys() if name != _HEAD]  # noqa: SIM118  # it is no mapping
        return sum(prod(tensors.get_slice(name).get_shape()) for name in names)


def _one_file_for_each_width(models: Iterable[Sequence[Path]], left_out: dict[Path, str]) -> dict[Path, frozenset[str]]:
    """Leave out GGUF files that are as wide as another one of the same model. Return `Family.stored`."""
    stored = {}
    for files in models:
        if not is_gguf(files[0]):
            continue
        by_width = {}
        for width, same in group_by(files, _width).items():
            by_width[width], *others = sorted(same, key=lambda file: abs(read_gguf(file).bits - width))
            left_out |= dict.fromkeys(others, "as another file of the model has about as many bits")
        if FULL_BITS in by_width:
            stored[by_width[FULL_BITS]] = frozenset(name for name, bits in QUANTIZE_BITS.items() if bits in by_width)
    return stored


def _identity(file: Path) -> Hashable:
    """Return what the GGUF files of one model have in common: no quantization changes the name and the norms."""
    if not is_gguf(file):
        return file
    header = read_gguf(file)
    norm = header.tensors.get(_GGUF_NORM)
    return header.field("general.name"), count_parameters(file), None if norm is None else norm.data.tobytes()


def _width(file: Path) -> int:
    """Return the bits of a weight of a GGUF file as 16, 8 or 4, by the smallest type of its matrices."""
    header = read_gguf(file)
    if not header.quantized:
        return FULL_BITS
    return QUANTIZE_BITS["int8" if header.least_bits >= _EIGHT_BITS else "int4"]


def _folder(place: str) -> Path:
    if place == HUB:
        from huggingface_hub import constants  # its packages are only for names on the Hub

        return Path(constants.HF_HUB_CACHE)  # which may not be there yet
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise OutriderError(f"--family names {folder}, which is no folder; name folders, or {HUB} for the Hub's cache")
    return folder


def _models(folder: Path) -> Iterator[Path]:
    """Yield the model folders and GGUF files in a folder: the first part of split files, and no image encoders."""
    for file in sorted(folder.rglob("config.json")):
        yield file.parent
    for file in sorted(folder.rglob(f"*{GGUF_SUFFIX}")):
        if parts_of(file)[0] == file and not file.name.lower().startswith("mmproj"):
            yield file


def _has_vocabulary(path: Path, tokenizer: Any) -> bool:
    return bool(_tokenizer(path).get_vocab() == tokenizer.get_vocab())


def _tokenizer(path: Path) -> Any:
    return load_tokenizer(read_gguf(path)) if is_gguf(path) else read_tokenizer(path)
