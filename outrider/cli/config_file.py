"""The files that `--config` reads: settings of an engine, or the advice of `outrider tune` and `outrider fit`.

A file of settings is a JSON object with fields of `EngineConfig`, such as {"target": "DIR", "k": 4, "max_num_seqs": 8}.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from outrider.lab.tune.config import configured

Options = TypeVar("Options")


class Merged(NamedTuple):
    """Options of a command after `--config`, and the settings of the file that are no options of the command."""

    options: Any
    others: dict[str, Any]


def merge_config(options: Options, file: str | None, *, given: Collection[str], min_k: int = 0) -> Merged:
    """Fill in the options that the user has not set.

    Args:
        options: a dataclass of options.
        file: the path, or None.
        given: names of the options that the user has set. They take precedence over the file.
        min_k: the smallest draft length that the command accepts.

    Raises:
        OutriderError: the file cannot be read, a setting is unknown, or a value is not allowed.
    """
    if file is None:
        return Merged(options, {})
    settings = _read_settings(file)
    if settings is None:
        return Merged(configured(options, file, given=given, min_k=min_k), {})
    known = {field.name for field in fields(options)}  # type: ignore[arg-type]
    unset = {name: value for name, value in settings.items() if name not in given}
    others = {name: value for name, value in unset.items() if name not in known}
    merged = replace(options, **{name: value for name, value in unset.items() if name in known})  # type: ignore[type-var]
    return Merged(merged, others)


def _read_settings(file: str) -> dict[str, Any] | None:
    """Return the settings of a file, or None if it is not a file of settings."""
    try:
        document = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the reader of advice reports it
        return None
    if not isinstance(document, dict) or "benchmark" in document:
        return None
    try:
        EngineConfig.from_options(**document)
    except OutriderError as error:
        raise OutriderError(f"config {file}: {error}") from None
    return document
