"""The state of a fit: the results of the finished stages, in a file that the same command resumes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import write_whole

FILE, HEAD, CONFIG = "state.json", "head", "fit.json"  # in the folder of a fit
RUNS = ".runs"  # suffix of the runs of a measurement that is not finished
_VERSION = 1
_HASHED = frozenset({"target", "prompts"})  # parts of an identity that are hashes, which messages do not show


class State:
    """The results of the finished stages, by name. Each change is written to the file at once."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], stages: dict[str, Any]) -> None:
        self._folder = folder
        self._identity = dict(identity)
        self._stages = stages

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *, overwrite: bool) -> State:
        """Return the state of a folder, or an empty one.

        Args:
            identity: what the interrupted fit must have in common with this one.
            overwrite: discard a state that is there, and its head.

        Raises:
            OutriderError: the file is damaged, or belongs to a fit with other options.
        """
        file = folder / FILE
        if overwrite and file.exists():
            discard(folder)
        if not file.exists():
            return cls(folder, identity, {})
        found = _read(file)
        changes = _changes(found["identity"], json.loads(json.dumps(identity)))  # as it is read from a file
        if found["version"] == _VERSION and not changes:
            return cls(folder, identity, found["stages"])
        raise OutriderError(
            f"{folder} holds a fit with other values of {', '.join(changes) or 'its version'}; use the same values,"
            " another --out, or --overwrite to start again"
        )

    def get(self, stage: str) -> Any:
        """Return the result of a stage, or None if it is not finished."""
        return self._stages.get(stage)

    def put(self, stage: str, result: Any) -> None:
        """Store the result of a stage.

        Raises:
            OutriderError: the file cannot be written. The previous file stays whole.
        """
        self._write({**self._stages, stage: result})

    def drop(self, *stages: str) -> None:
        """Forget the results of stages, so that they run again."""
        self._write({name: result for name, result in self._stages.items() if name not in stages})

    def _write(self, stages: dict[str, Any]) -> None:
        make_folder(self._folder)
        document = {"version": _VERSION, "identity": self._identity, "stages": stages}
        write_whole(self._folder / FILE, json.dumps(document) + "\n")
        self._stages = stages  # not before it is on the disk


def make_folder(folder: Path) -> None:
    """Make a folder. Raises OutriderError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutriderError(f"{folder} cannot be made ({error.strerror}); use another --out") from None


def discard(folder: Path) -> None:
    """Remove the state, the configuration and the head of a fit."""
    for file in (folder / FILE, folder / CONFIG, *folder.glob(f"*{RUNS}")):
        file.unlink(missing_ok=True)
    shutil.rmtree(folder / HEAD, ignore_errors=True)


def _changes(theirs: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that differ between the identities of two fits, most of them with both values."""
    changes = []
    for name in sorted({*theirs, *wanted}):
        if theirs.get(name) != wanted.get(name):
            values = "" if name in _HASHED else f" ({_text(theirs.get(name))} there, {_text(wanted.get(name))} here)"
            changes.append(f"{name}{values}")
    return changes


def _text(value: Any) -> str:
    """Return the value of an option as the command line takes it."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"version", "identity", "stages"} <= found.keys():
        raise OutriderError(f"{file} cannot be read; use another --out, or --overwrite to start again")
    return found
