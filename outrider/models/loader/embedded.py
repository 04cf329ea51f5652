"""Names of models: folders, GGUF files, embedded models as `@NAME`, and models of the Hugging Face Hub."""

from pathlib import Path

from outrider.errors import OutriderError, either
from outrider.models.loader.hub.names import hub_name
from outrider.models.loader.paths import is_gguf

_ASSETS = Path(__file__).parents[2] / "assets"


def embedded(name: str) -> Path:
    """Return the folder of an embedded model. Command lines and expressions call it `@NAME`.

    Raises:
        OutriderError: there is no embedded model of this name.
    """
    folder = _ASSETS / name
    if not name or not (folder / "config.json").is_file():
        names = sorted(f"@{file.parent.name}" for file in _ASSETS.glob("*/config.json"))
        raise OutriderError(f"@{name} does not come with Outrider; use {either(names)}")
    return folder


def model_folder(name: str | Path | None, *, weights: bool = True) -> Path:
    """Return the folder of a model, or its GGUF file. A model of the Hub is downloaded if its cache lacks it.

    Args:
        name: a folder or a GGUF file, `@NAME` for an embedded model, or a name on the Hub; None: the embedded target.
        weights: whether a model of the Hub needs its weights, and not only its configuration and tokenizer.

    Raises:
        OutriderError: there is no model of this name, it cannot be downloaded, or `name` is not a name.
    """
    if name is None:
        return embedded("mini")
    if not isinstance(name, str | Path) or not str(name):
        raise OutriderError(
            f"target is {name!r}; give the folder of a model, or leave it out to use the embedded model"
        )
    text = str(name)
    if text.startswith("@"):
        return embedded(text[1:])
    if (on_hub := hub_name(text)) is None:
        return Path(text).expanduser()
    from outrider.models.loader.hub.fetch import hub_folder  # its packages are only for names on the Hub

    return hub_folder(on_hub, weights=weights)


def absolute_name(name: str | Path | None) -> str:
    """Return a name of a model that does not depend on the current folder. A name on the Hub stays as it is."""
    if hub_name(name) is not None:
        return str(name)
    path = model_folder(name)
    # A GGUF file may be a link to a file with another name, as in the cache of the Hub.
    return str(path.parent.resolve() / path.name if is_gguf(path) else path.resolve())


def model_name(name: str | Path | None) -> str:
    """Return what to call a model: its name on the Hub, its GGUF file without the suffix, or the end of its folder."""
    if hub_name(name) is not None:
        return str(name)
    path = Path(absolute_name(name))
    return path.stem if is_gguf(path) else path.name


def check_is_folder(path: Path) -> None:
    """Raise OutriderError if a path is no folder."""
    if not path.is_dir():
        raise OutriderError(
            f"{path} is not a folder; give the folder that holds the model's config.json, or a GGUF file"
        )


def is_embedded(folder: Path) -> bool:
    """Return whether a folder is that of an embedded model."""
    return folder.resolve().parent == _ASSETS.resolve()
