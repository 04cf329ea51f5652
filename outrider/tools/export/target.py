"""The target of an exported draft, as the command of another engine names it."""

from dataclasses import dataclass
from pathlib import Path

from outrider.models.loader.embedded import is_embedded, model_folder
from outrider.models.loader.hub.names import hub_name
from outrider.tools.export.engines import TARGET, Recipe

_FILE = "target.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTarget:
    """The target in the command of an engine."""

    name: str  # an existing folder or file, the name of a model on the Hub, or TARGET
    gguf: str  # the GGUF file of an engine that needs one
    converts: bool = False  # the command writes `gguf` with the converter of llama.cpp
    source: Path | None = None  # an embedded model that is written as `gguf`


def find_target(target: str | None, recipe: Recipe, out: Path) -> ExportedTarget:
    """Return how a command names a target.

    `@NAME` becomes the folder of the embedded model, and the name of a model on the Hub stays. For
    an engine that reads GGUF, the file is `target` itself, the file `TARGET.gguf` beside its
    folder, or one in `out`: written at once for an embedded model, whose tokenizer the converter of
    llama.cpp does not know, and by the first line of the command for other folders.

    Args:
        target: as the user gave it.
        recipe: what the engine needs.
        out: the folder of the export.

    Raises:
        OutriderError: there is no embedded model of this name.
    """
    if target is None:
        return ExportedTarget(name=TARGET, gguf=f"{TARGET}.gguf")
    on_hub = hub_name(target)
    if on_hub is not None and on_hub.gguf is None:  # other engines fetch it themselves
        return ExportedTarget(name=target, gguf=f"{target}.gguf")
    path = model_folder(target)
    if path.suffix == ".gguf":
        return ExportedTarget(name=str(path), gguf=str(path))
    beside = f"{path}.gguf"
    if not recipe.needs_target_gguf or not path.is_dir() or Path(beside).is_file():
        return ExportedTarget(name=str(path), gguf=beside)
    written = str(out / _FILE)
    if is_embedded(path):
        return ExportedTarget(name=str(path), gguf=written, source=path)
    return ExportedTarget(name=str(path), gguf=written, converts=True)


def tokenizer_note(target: ExportedTarget, recipe: Recipe) -> str:
    """Return why a command does not run as it is, or "" if it does."""
    if not recipe.converts_head or target.source is None:
        return ""
    return (
        "the converter stops at the tokenizer of an embedded model: add it to get_vocab_base_pre of"
        " the converter, with the result llama-bpe"
    )
