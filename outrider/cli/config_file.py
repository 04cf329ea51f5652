"""The files that `--config` reads: settings of an engine, or the advice of `outrider tune` and `outrider fit`.

A file of settings is a JSON object with fields of `EngineConfig`, such as {"target": "DIR", "k": 4, "max_num_seqs": 8}.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from outrider.lab.tune.config import advised


def merge_config(options: Mapping[str, Any], file: str, *, given: Collection[str]) -> dict[str, Any]:
    """Return fields of `EngineConfig`: the options, and what the file says in place of those that are not given.

    Args:
        options: the options of a command, by name.
        given: names of the options that the user has set. They take precedence over the file.

    Raises:
        OutriderError: the file cannot be read, a setting is unknown, or a value is not allowed.
    """
    settings = _read_settings(file)
    if settings is None:
        settings = advised(file, options, given=given)
    return {**options, **{name: value for name, value in settings.items() if name not in given}}


def _read_settings(file: str) -> dict[str, Any] | None:
    """Return the fields of `EngineConfig` in a file of settings; None: the file is another one, or cannot be read."""
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
