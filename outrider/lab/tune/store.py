"""A file with the runs of a measurement that is not finished. The same command resumes from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from outrider.core.option import as_json
from outrider.core.stats import Stats
from outrider.lab.common.clock import DecodeSpeed
from outrider.lab.tune.settings import Settings
from outrider.lab.tune.trial import Trial, Variant
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.runtime.atomic_files import write_whole

_COUNTS = ("offered", "reached", "accepted")  # fields of `Stats` that are tuples


class GroupKey(NamedTuple):
    """Runs of all variants on one batch of prompts, which are comparable with each other."""

    repeat: int
    batch: int  # sequences at once
    temperature: float
    number: int  # of the batch of prompts


class TrialStore:
    """Groups of runs by key. The file has all finished groups at any time, and is never half written."""

    def __init__(self, file: Path | None, settings: Settings) -> None:
        """Read the groups of an earlier command with the same settings, models and prompts.

        Args:
            file: the file; None: nothing is kept.
            settings: what is measured.
        """
        self._file = file
        self._identity = {} if file is None else _identity(settings)
        self.facts: dict[str, Any] = {}  # what was decided before the first group
        self.groups: dict[GroupKey, list[Trial]] = {}
        self._lines: list[str] = []  # of the file
        if file is not None:
            self._read(file)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Store what was decided before the first group, unless it is known. Errors are those of `add`."""
        if self.facts:
            return
        self.facts = dict(facts)
        self._append({"identity": self._identity, "facts": self.facts})

    def add(self, key: GroupKey, trials: Sequence[Trial]) -> None:
        """Store the runs of a group.

        Raises:
            OutriderError: the file cannot be written.
        """
        self.groups[key] = list(trials)
        self._append({"key": list(key), "trials": list(map(asdict, trials))})

    def remove(self) -> None:
        """Remove the file, because the measurement is finished."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        self._lines.append(json.dumps(entry) + "\n")
        write_whole(self._file, "".join(self._lines))

    def _read(self, file: Path) -> None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            header, *entries = map(json.loads, lines)
        except (OSError, ValueError):
            return
        if header.get("identity") != json.loads(json.dumps(self._identity)):
            return
        self._lines = lines
        self.facts = header["facts"]
        for entry in entries:
            self.groups[GroupKey(*entry["key"])] = list(map(_trial, entry["trials"]))


def _identity(settings: Settings) -> dict[str, Any]:
    prompts = None
    if settings.prompts is not None:
        prompts = hashlib.sha256(Path(settings.prompts).expanduser().read_bytes()).hexdigest()
    target = model_fingerprint(model_folder(settings.engine.target))
    return {**as_json(settings), "prompts": prompts, "target": target}


def _trial(document: Mapping[str, Any]) -> Trial:
    return Trial(
        **{
            **document,
            "variant": Variant(**document["variant"]),
            "speed": DecodeSpeed(**document["speed"]),
            "stats": _stats(document["stats"]),
            "categories": {name: _stats(stats) for name, stats in document["categories"].items()},
            "output_thirds": tuple(map(_stats, document["output_thirds"])),
        }
    )


def _stats(document: Mapping[str, Any]) -> Stats:
    counts = {name: tuple(document[name]) for name in _COUNTS}
    return Stats(**{**document, **counts})  # a trial has no bound
