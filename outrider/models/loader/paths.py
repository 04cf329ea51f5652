"""Tell paths of models apart by their names."""

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file."""
    return Path(path).suffix.lower() == GGUF_SUFFIX
