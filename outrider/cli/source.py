"""The source of an encoder-decoder target, from the options `--source` and `--source-file`."""

from __future__ import annotations

from pathlib import Path

from outrider.core.text import is_utf8
from outrider.errors import OutriderError


def read_source(text: str | None, file: str | None) -> str | None:
    """Return the source, or None if no option is set. A line break at the end of the file is left out.

    Raises:
        OutriderError: both options are set, or the source cannot be read.
    """
    if text is not None and file is not None:
        raise OutriderError("--source and --source-file were both given; use one of them")
    if text is not None:
        if not is_utf8(text):
            raise OutriderError("the source is not UTF-8 text; give UTF-8 text")
        return text
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        return path.read_text("utf-8").removesuffix("\n")
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise OutriderError(f"{path} is not UTF-8 text; give a text file in UTF-8") from error
