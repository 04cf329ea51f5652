"""A file with the runs of a measurement that is not finished. The same command resumes from it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.core.option import as_json
from outrider.lab.common.records import from_json
from outrider.lab.common.trial import GroupKey, Trial
from outrider.lab.tune.budget import Budget
from outrider.lab.tune.settings import Settings
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.fingerprint import model_fingerprint
from outrider.runtime.atomic_files import write_whole


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
        self.budget: Budget | None = None  # None: nothing is stored
        self.groups: dict[GroupKey, Sequence[Trial]] = {}
        self._lines: list[str] = []  # of the file
        if file is not None:
            self._read(file)

    def begin(self, budget: Budget) -> None:
        """Store what is decided before the first group. Errors are those of `add`."""
        self.budget = budget
        self._append({"identity": self._identity, "budget": budget._asdict()})

    def add(self, key: GroupKey, trials: Sequence[Trial]) -> None:
        """Store the runs of a group, without the times between tokens.

        Raises:
            OutriderError: the file cannot be written.
        """
        self.groups[key] = [replace(trial, gaps=()) for trial in trials]
        self._append({"key": asdict(key), "trials": list(map(asdict, self.groups[key]))})

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
        self.budget = Budget(**header["budget"])
        for entry in entries:
            self.groups[from_json(GroupKey, entry["key"])] = [from_json(Trial, each) for each in entry["trials"]]


def _identity(settings: Settings) -> dict[str, Any]:
    prompts = None
    if settings.prompts is not None:
        prompts = hashlib.sha256(Path(settings.prompts).expanduser().read_bytes()).hexdigest()
    target = model_fingerprint(model_folder(settings.engine.target))
    return {**as_json(settings), "prompts": prompts, "target": target}
