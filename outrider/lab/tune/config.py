"""Writes the recommendation as settings, and reads them for `--config` of other commands."""

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from outrider.core.config import DRAFT_OPTIONS, QUANTIZE_BITS, EngineConfig
from outrider.core.params import AUTO
from outrider.core.text import read_text
from outrider.drafting.propose.expression import absolute, model_names
from outrider.drafting.propose.registry import draft_settings
from outrider.errors import OutriderError
from outrider.models.loader.embedded import absolute_name, model_folder
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.verify.relaxed.registry import with_absolute_table

BENCHMARK, VERSION = "outrider tune", 1
FIT = "outrider fit"  # its documents have the same settings
_TARGET_OPTIONS = ("target", "dtype", "kernels", "quantize", "kv_dtype")
# Tuned for the proposer of the file, and useless for another one.
_PROPOSER_OPTIONS = ("k", "verifier", *DRAFT_OPTIONS)
_OPTIONS = (*_TARGET_OPTIONS, "proposer", *_PROPOSER_OPTIONS)

_log = logging.getLogger("outrider")


def settings_dict(
    engine: EngineConfig, *, proposer: str, k: int | str, verifier: str, draft_quantize: str | None = None
) -> dict[str, Any]:
    """Return the settings to run, with absolute folders or names on the Hub, and with hashes of the models.

    Args:
        engine: what was measured.
        proposer, k, verifier, draft_quantize: the recommendation.
    """
    expression = absolute(proposer)
    # The embedded target has no folder here: it comes with the installed program.
    target = None if engine.target is None else absolute_name(engine.target)
    names = [*([target] if target else ()), *model_names(expression)]
    return {
        "target": target,
        "proposer": expression,
        "k": k,
        "verifier": with_absolute_table(verifier),
        "dtype": engine.dtype,
        "kernels": engine.kernels,
        "quantize": engine.quantize,
        "kv_dtype": engine.kv_dtype,
        **draft_settings(engine, expression, draft_quantize=draft_quantize),
        "models": {name: model_fingerprint(model_folder(name)) for name in names},
    }


def advised(file: str, options: Mapping[str, Any], *, given: Collection[str]) -> dict[str, Any]:
    """Return the settings of a file that take the place of options.

    Args:
        file: a file of `outrider tune --out`.
        options: the options of a command, by name.
        given: the names of those that the user has set. They take precedence. If the user has set the proposer, the k,
            the verifier and the draft settings of the file are not used either.

    Raises:
        OutriderError: the file cannot be read, is not a file of `outrider tune`, or its models are missing.
    """
    settings = _read(file)
    fixed = {*given, *(_PROPOSER_OPTIONS if "proposer" in given else ())}
    values = {name: settings[name] for name in _OPTIONS if name not in fixed}
    _check_models(file, settings, values)
    if "target" in given and "proposer" in values:
        _warn_of_other_target(file, settings["target"], options["target"])
    if values.get("proposer") == "none" and "k" in given:
        raise OutriderError(f"{file} recommends plain decoding, and k was given; give --proposer as well, or no --k")
    return values


def _warn_of_other_target(file: str, tuned: str | None, used: str | None) -> None:
    """Warn if the settings of a file were measured with another target."""
    if absolute_name(tuned) != absolute_name(used):
        _log.warning(
            "the settings of %s were measured with %s; run outrider tune for %s to find its own",
            file,
            tuned or "the embedded target",
            used or "the embedded target",
        )


def _read(file: str) -> Mapping[str, Any]:
    fix = f"write one with: outrider tune --out {file}, or write fields of EngineConfig, such as "
    text = read_text(file, f"config {file}", fix=fix + '{"target": "DIR", "k": 4}')
    try:
        document = json.loads(text)
    except ValueError as error:
        raise OutriderError(
            f"config {file} is not valid JSON ({error}); correct it, or write one with: outrider tune --out {file}"
        ) from None
    if not isinstance(document, dict) or document.get("benchmark") not in (BENCHMARK, FIT):
        raise OutriderError(
            f"{file} is not a JSON object with fields of EngineConfig, and not a file of outrider tune or outrider fit;"
            f" write it with: outrider tune --out {file}"
        )
    if document.get("version") != VERSION:
        raise OutriderError(
            f"{file} has version {document.get('version')}, and this program reads version {VERSION}; write it again"
            f" with: outrider tune --out {file}"
        )
    settings = document.get("settings")
    if isinstance(settings, dict):
        settings.setdefault("kv_dtype", AUTO)  # files of earlier versions lack it
    if not isinstance(settings, dict) or not {*_OPTIONS, "models"} <= settings.keys():
        raise OutriderError(f"{file} lacks settings; write it again with: outrider tune --out {file}")
    invalid = [name for name in (*_OPTIONS, "models") if not _is_valid(name, settings[name])]
    if invalid:
        name = invalid[0]
        raise OutriderError(
            f"{file} has {name} {settings[name]!r}, which is invalid; write it again with: outrider tune --out {file}"
        )
    return settings


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a setting has the type that `settings_dict` writes."""
    if name == "k":
        return value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    if name in ("draft_window", "draft_candidates"):
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    if name == "draft_quantize":
        return value is None or (isinstance(value, str) and value in QUANTIZE_BITS)
    if name == "models":
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    return isinstance(value, str) or (name in ("target", "quantize") and value is None)


def _check_models(file: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check that the models to use exist and have not changed."""
    hashes = settings["models"]
    used: list[str] = []
    if values.get("target"):
        used.append(values["target"])
    if "proposer" in values:
        used += [name for name in hashes if name != settings["target"]]
        used += model_names(values["proposer"])  # existing folders only; `hashes` also names missing ones
    for name in dict.fromkeys(used):
        folder = model_folder(name)
        if not folder.exists():
            raise OutriderError(
                f"{name}, a model of {file}, is missing; give the model with --target or --proposer, or tune again"
            )
        if name not in hashes:
            raise OutriderError(
                f"{file} has no hash of {name}, which may have changed since; write it again with:"
                f" outrider tune --out {file}"
            )
        if hashes[name] != model_fingerprint(folder):
            raise OutriderError(
                f"{name} has changed since {file} was written; tune again, or give --target and --proposer yourself"
            )
