"""The module for multi-token prediction in the checkpoint of a target."""

from pathlib import Path

from outrider.errors import OutriderError
from outrider.models.heads.files import read_target_info
from outrider.models.heads.formats.registry import find, missing_projection


def has_mtp(folder: str | Path) -> bool:
    """Return whether the checkpoint of a target has a module for multi-token prediction of a known kind.

    A damaged module counts, so that loading it reports what is missing.
    """
    path = Path(folder).expanduser()
    try:
        found = find(path)
        if found is None:
            return missing_projection(path) is not None
        return found.whole() and found.belongs(read_target_info(path))
    except OutriderError:
        return False
