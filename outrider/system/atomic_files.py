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


def check_folder(path: str | Path, option: str) -> None:
    """Whether files could be written into this folder, which need not be there yet; a leading ~ is the home.

    Raises:
        OutriderError: they could not; the message begins with the `option` that named it.
    """
    folder = Path(path).expanduser()
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not there.is_dir():
        what = "is a file" if there == folder else f"is to be in {there}, which is a file"
        raise OutriderError(f"{option} {path} {what}; name a folder, which is made where there is none")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutriderError(f"{option} {path} cannot be written, as {there} does not let you; name another folder")


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
