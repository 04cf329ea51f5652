"""Hashes that tell whether a checkpoint or the code of Outrider has changed."""

import hashlib
from functools import cache
from pathlib import Path

from outrider.models.loader.gguf.file import parts_of
from outrider.models.loader.paths import is_gguf

_PACKAGE = Path(__file__).resolve().parents[2]
_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")
_NUM_SAMPLES = 16  # samples of a file that are hashed
_SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path) -> str:
    """Return a hash of a model folder or a GGUF file. It reads samples of the weights, not all of them."""
    digest = hashlib.sha256()
    folder = folder.expanduser()
    files = sorted(folder.glob("*")) if folder.is_dir() else parts_of(folder) if is_gguf(folder) else [folder]
    for file in files:
        if file.suffix not in _SUFFIXES or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for i in range(_NUM_SAMPLES):
                content.seek(i * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@cache
def code_fingerprint() -> str:
    """Return a hash of the sizes and times of Outrider's own Python files."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
