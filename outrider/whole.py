"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.errors import OutriderError


def check_writable(path: str | Path) -> None:
    """Whether `write_whole` could write this file, asked before there is anything to lose; a leading ~ is the home.

    Raises:
        OutriderError: it could not.
    """
    file = Path(path).expanduser()
    with _beside(file) as whole:
        if file.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        whole.touch()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else reads or writes it at the same time.

    Raises:
        OutriderError: it cannot be written.
    """
    with _beside(path) as whole:
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Where a file can grow until it takes the place of `path`."""
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".outrider-") as folder:
            yield Path(folder) / path.name
    except OSError as error:
        raise OutriderError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that can be"
        ) from None
