"""Write files atomically, and check in advance whether files and folders can be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EISDIR, ENOSPC
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.errors import OutriderError


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, before the work that produces it. A leading ~ is the home folder.

    Raises:
        OutriderError: the file cannot be written.
    """
    file = Path(path).expanduser()
    with _temporary_path(file) as temporary:
        if file.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        temporary.touch()


def check_folder(path: str | Path, option: str) -> None:
    """Check that a folder can be created or written to. A leading ~ is the home folder.

    Raises:
        OutriderError: the path is empty, or it cannot be created or written to. The message starts
            with the name of the `option`.
    """
    if not str(path):  # which is the current folder for pathlib
        raise OutriderError(f"{option} is empty; name a folder")
    folder = Path(path).expanduser()
    existing = next(filter(os.path.exists, (folder, *folder.parents)))
    if not existing.is_dir():
        problem = "is a file" if existing == folder else f"is inside {existing}, which is a file"
        raise OutriderError(f"{option} {path} {problem}; name a folder; it is created if it does not exist")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutriderError(f"{option} {path} cannot be written: no permission for {existing}; name another folder")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically. A text becomes UTF-8. Raises OutriderError if the file cannot be written."""
    with _temporary_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder next to `path`. Errors become `OutriderError`."""
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".outrider-") as folder:
            yield Path(folder) / path.name
    except OSError as error:
        fix = "free some space" if error.errno in (ENOSPC, EDQUOT) else "name a file in a writable folder"
        raise OutriderError(f"{path} cannot be written ({error.strerror}); {fix}") from None
