"""Atomic writes of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.errors import OutriderError


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, before the work whose result it will hold. A leading ~ is the home folder.

    Raises:
        OutriderError: it cannot be written.
    """
    file = Path(path).expanduser()
    with _beside(file) as whole:
        if file.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        whole.touch()


def check_folder(path: str | Path, option: str) -> None:
    """Check that a folder can be created or written to. A leading ~ is the home folder.

    Raises:
        OutriderError: it cannot; the message starts with the name of the `option`.
    """
    folder = Path(path).expanduser()
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not there.is_dir():
        what = "is a file" if there == folder else f"is to be in {there}, which is a file"
        raise OutriderError(f"{option} {path} {what}; name a folder, which is made where there is none")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutriderError(f"{option} {path} cannot be written, as {there} does not let you; name another folder")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        OutriderError: it cannot be written.
    """
    with _beside(path) as whole:
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Return a temporary path in the same folder."""
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".outrider-") as folder:
            yield Path(folder) / path.name
    except OSError as error:
        raise OutriderError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that can be"
        ) from None
