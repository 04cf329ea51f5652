"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.errors import OutriderError


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else reads or writes it at the same time.

    Raises:
        OutriderError: it cannot be written.
    """
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".outrider-") as folder:
            whole = Path(folder) / path.name
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        raise OutriderError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that can be"
        ) from None
