"""Tell paths of models apart by their names."""

import os.path
from pathlib import Path

GGUF_SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file."""
    return Path(path).suffix.lower() == GGUF_SUFFIX


def is_local_model(text: str) -> bool:
    """Return whether a text is the path of a GGUF file or of the folder of a model."""
    path = os.path.expanduser(text)  # unlike those of Path, these functions accept texts of any length
    return os.path.isfile(path) if is_gguf(path) else os.path.isfile(os.path.join(path, "config.json"))
