"""Models that come with Outrider: a target, its draft model, and drafts that were trained on its states."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import OutriderError

_MODELS = Path(__file__).parent.parent / "assets"


def embedded(name: str) -> Path:
    """The folder of one of them; in an expression it is written @NAME.

    Raises:
        OutriderError: there is none of that name.
    """
    folder = _MODELS / name
    if not name or not (folder / "config.json").is_file():
        known = ", ".join(sorted(f"@{file.parent.name}" for file in _MODELS.glob("*/config.json")))
        raise OutriderError(f"@{name} does not come with Outrider; use {known}")
    return folder


def model_folder(name: str | Path | None) -> Path:
    """What a user calls a model: a folder, or `@NAME`, one of these; None is the target among them.

    Raises:
        OutriderError: `@NAME` is none of these, or it is no name at all.
    """
    if name is None:
        return embedded("mini")
    if not isinstance(name, str | Path) or not str(name):
        raise OutriderError(f"target is {name!r}; give the folder of a model, or nothing for the one that comes along")
    return embedded(text[1:]) if (text := str(name)).startswith("@") else Path(text).expanduser()
