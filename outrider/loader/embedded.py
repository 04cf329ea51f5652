"""The models that are included in Outrider: targets, a draft model and draft heads."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import OutriderError

_ASSETS = Path(__file__).parent.parent / "assets"


def embedded(name: str) -> Path:
    """Return the folder of an included model. Command lines and expressions call it `@NAME`.

    Raises:
        OutriderError: there is no included model of this name.
    """
    folder = _ASSETS / name
    if not name or not (folder / "config.json").is_file():
        names = ", ".join(sorted(f"@{file.parent.name}" for file in _ASSETS.glob("*/config.json")))
        raise OutriderError(f"@{name} does not come with Outrider; use {names}")
    return folder


def model_folder(name: str | Path | None) -> Path:
    """Return the folder of a model.

    Args:
        name: a folder, or `@NAME` for an included model; None: the included target.

    Raises:
        OutriderError: there is no included model of this name, or `name` is not a name.
    """
    if name is None:
        return embedded("mini")
    if not isinstance(name, str | Path) or not str(name):
        raise OutriderError(
            f"target is {name!r}; give the folder of a model, or leave it out to use the included model"
        )
    text = str(name)
    return embedded(text[1:]) if text.startswith("@") else Path(text).expanduser()


def is_embedded(folder: Path) -> bool:
    """Return whether a folder is that of an included model."""
    return folder.resolve().parent == _ASSETS.resolve()
