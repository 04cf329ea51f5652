"""The answer as a file: settings that `--config` of other verbs takes over."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.core.params import AUTO
from outrider.errors import OutriderError
from outrider.loader.embedded import model_folder
from outrider.plan.store import model_folders, model_print
from outrider.propose.expression import absolute
from outrider.tune.settings import Settings

BENCHMARK, VERSION = "outrider tune", 1
FIT = "outrider fit"  # its documents have the same settings
_TAKEN = ("target", "proposer", "k", "verifier", "dtype", "kernels", "quantize")
_OF_PROPOSER = ("k", "verifier")  # which were found for it, and say nothing of another one

Options = TypeVar("Options")


def settings_dict(settings: Settings, *, proposer: str, k: int | str, verifier: str) -> dict[str, Any]:
    """What to run, with folders that mean the same wherever the file is read from, and hashes of the models."""
    found = absolute(proposer)
    target = None if settings.target is None else str(model_folder(settings.target).resolve())
    # The embedded target comes with the program, wherever that is.
    folders = [*([Path(target)] if target else ()), *model_folders(found)]
    return {
        "target": target,
        "proposer": found,
        "k": k,
        "verifier": verifier,
        "dtype": settings.dtype,
        "kernels": settings.kernels,
        "quantize": settings.quantize,
        "models": {str(folder): model_print(folder) for folder in folders},
    }


def configured(options: Options, file: str, *, given: Collection[str], least: int = 0) -> Options:
    """A verb's options with what the file has found in place of defaults.

    Args:
        options: a dataclass with fields of the names in the file.
        file: what `outrider tune --out` wrote.
        given: the fields that the user has set, which stay. With another proposer, what was found for the file's own
            stays out of it.
        least: guesses a round without which the verb makes no sense.

    Raises:
        OutriderError: the file cannot be read, is none of ours, or its models are gone.
    """
    found = _read(file)
    known = {field.name for field in fields(options)}  # type: ignore[arg-type]
    stays = {*given, *(_OF_PROPOSER if "proposer" in given else ())}
    taken = {name: found[name] for name in _TAKEN if name in known and name not in stays}
    _check_models(file, found, taken)
    if taken.get("proposer") == "none" and "k" in given:
        raise OutriderError(f"{file} advises plain decoding, and k was given; give --proposer as well, or no --k")
    if not isinstance(k := taken.get("k", least), str) and k < least:
        raise OutriderError(f"{file} advises plain decoding, which leaves nothing to compare; give --proposer and --k")
    return replace(options, **taken)  # type: ignore[type-var]


def _read(file: str) -> Mapping[str, Any]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OutriderError(
            f"config {file} cannot be read ({reason}); write one with: outrider tune --out {file}"
        ) from None
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("benchmark") not in (BENCHMARK, FIT):
        raise OutriderError(f"{file} is no advice; write it with: outrider tune --out {file}")
    if document.get("version") != VERSION:
        raise OutriderError(
            f"{file} is advice of version {document.get('version')}, and this program reads version {VERSION}; write it"
            f" anew with: outrider tune --out {file}"
        )
    settings = document.get("settings")
    if not isinstance(settings, dict) or not {*_TAKEN, "models"} <= settings.keys():
        raise OutriderError(f"{file} lacks settings; write it anew with: outrider tune --out {file}")
    if wrong := [name for name, value in settings.items() if not _fits(name, value)]:
        raise OutriderError(
            f"{file} has {wrong[0]} {settings[wrong[0]]!r}, which is none; write it anew with:"
            f" outrider tune --out {file}"
        )
    return settings


def _fits(name: str, value: Any) -> bool:
    """Whether a setting is of the kind that `settings_dict` writes."""
    if name == "k":
        return value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    if name == "models":
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    return isinstance(value, str) or (name in ("target", "quantize") and value is None) or name not in _TAKEN


def _check_models(file: str, found: Mapping[str, Any], taken: Mapping[str, Any]) -> None:
    """Those that are about to be used are there, and what they were."""
    used: list[Path] = []
    if taken.get("target"):
        used.append(Path(taken["target"]))
    if "proposer" in taken:
        used += [Path(folder) for folder in found["models"] if folder != found["target"]]
        used += model_folders(taken["proposer"])  # those that are there; of one that is gone the file itself must know
    for folder in dict.fromkeys(used):
        if not folder.is_dir():
            raise OutriderError(
                f"{folder}, which {file} is about, is gone; name its place with --target or --proposer, or tune again"
            )
        if str(folder) not in found["models"]:
            raise OutriderError(
                f"{file} does not say what {folder} was, and it may have changed since; write it anew with:"
                f" outrider tune --out {file}"
            )
        if found["models"][str(folder)] != model_print(folder):
            raise OutriderError(
                f"{folder} has changed since {file} was written; tune again, or give --target and --proposer yourself"
            )
