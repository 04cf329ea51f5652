"""Which files of a repository make a model.

First the small files are fetched, then the weights. So weights in the cache mean that the rest is there as well.
"""

import fnmatch
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.models.loader.gguf.file import parts_of
from outrider.models.loader.hub.names import HubName
from outrider.models.loader.paths import is_gguf

CONFIG = "config.json"
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Patterns of what is read besides the weights: configuration, tokenizer, chat template, features of speech.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.jinja",
    "chat_template.json",
    "calibration.json",  # of models for videos
    _INDEX,
    "draft_vocab.safetensors",
    "mask_embedding.pt",  # never unpickled; a head that has it is refused
)
SUBFOLDERS = "*/*"  # a pattern; they hold other formats, such as onnx/
_UNREAD = ("consolidated*.safetensors", "adapter_model*.safetensors")  # weights in another layout, and of adapters
# Draft heads are read from pickled files, as tensors without code. Models are not.
_PICKLED_HEADS = ("medusa_lm_head.pt", "hydra_lm_head.pt")
_PICKLED = "pytorch_model.bin"


def weight_files(name: HubName, folder: Path, files: Collection[str]) -> list[str]:
    """Return the files with the weights of a model or a draft head.

    Args:
        name: the name, for messages.
        folder: the small files of the repository.
        files: all files of the repository.

    Raises:
        OutriderError: the repository holds neither.
    """
    top = sorted(file for file in files if "/" not in file)
    if CONFIG not in top:
        if "adapter_config.json" in top:
            return []  # the loader says what to do with an adapter
        raise _no_model(name, files)
    if _INDEX in top:
        shards = set(map(str, dict(_read(folder / _INDEX).get("weight_map") or {}).values()))
        return sorted(shards | ({_WEIGHTS} & set(top)))
    if _WEIGHTS in top:
        return [_WEIGHTS]
    unread = {file for pattern in _UNREAD for file in fnmatch.filter(top, pattern)}
    weights = [file for file in top if file.endswith(".safetensors") and file not in unread]
    weights = weights or [file for file in top if file in _PICKLED_HEADS]
    if not weights and _PICKLED in top and int(_read(folder / CONFIG).get("num_hidden_layers") or 0) <= 1:
        weights = [_PICKLED]  # of a draft head, which has at most one layer
    if not weights:
        raise _no_model(name, files)
    return weights


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """Return the parts of the GGUF file that a name means, the first one first.

    Raises:
        OutriderError: there is no such file, or several.
    """
    wanted = re.escape(name.gguf or "")
    models = _gguf_models(files)
    found: list[str] = []
    for pattern in (rf"(.*/)?{wanted}(-\d{{5}}-of-\d{{5}})?\.gguf", rf".*(?<![a-z\d]){wanted}(?![a-z\d_]).*"):
        found = found or [model for model in models if re.fullmatch(pattern, model, re.IGNORECASE)]
    if len(found) == 1:
        return list(map(str, parts_of(Path(found[0]))))
    if found:
        raise OutriderError(
            f"{name.repo} has several GGUF files of {name.gguf}: {', '.join(found)}; name one of"
            f" them in full, such as {name.repo}:{Path(found[0]).stem}"
        )
    raise OutriderError(f"{name.repo} has no GGUF file of {name.gguf}; it has {', '.join(models) or 'none at all'}")


def _gguf_models(files: Collection[str]) -> list[str]:
    """Return the GGUF files of language models, with the first part of split ones only."""
    paths = [Path(file) for file in files if is_gguf(file)]
    models = [path for path in paths if not path.name.lower().startswith("mmproj")]  # the encoder of pictures
    return sorted({str(parts_of(path)[0]) for path in models})


def _no_model(name: HubName, files: Collection[str]) -> OutriderError:
    """Return the error of a repository without weights that are read."""
    if models := _gguf_models(files):
        return OutriderError(
            f"{name.repo} has GGUF files only; add the type of one, such as {name.repo}:Q4_K_M. It"
            f" has {', '.join(models)}"
        )
    if CONFIG not in files:
        return OutriderError(f"{name.repo} has no {CONFIG}, so it is no model that can be loaded; use another one")
    return OutriderError(
        f"{name.repo} has no safetensors, and no other weights of models are read; use a repository with safetensors,"
        f' or make a folder with AutoModelForCausalLM.from_pretrained("{name.repo}").save_pretrained(DIR)'
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise OutriderError(f"{file} is no JSON object, so it is damaged on the Hub; use another revision or model")
    return content
