"""Writes the log of a training: one JSON line per generation cycle, and TensorBoard events if wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.train.trainer import StepStats

FILE = "log.jsonl"


class Log:
    """The log of a training in a folder."""

    def __init__(self, folder: Path, *, begin: int, events: bool) -> None:
        """Open the log, and remove all lines after generation cycle `begin`.

        Args:
            begin: number of the last cycle that the state of the training includes.
            events: also write TensorBoard events.

        Raises:
            OutriderError: the folder cannot be written, or TensorBoard is missing.
        """
        self._events = _tensorboard_writer(folder) if events else None
        self._file = folder / FILE
        self.lines = [line for line in read_log(folder) if line["cycle"] <= begin]
        write(self._file, "".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def last_evaluation(self) -> dict[str, Any]:
        """The results of the last evaluation; empty if there is none."""
        return dict(self.lines[-1]["evaluation"]) if self.lines else {}

    def add(
        self, cycle: int, stats: Sequence[StepStats], evaluation: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        """Write the line of a generation cycle.

        Args:
            cycle: number of the cycle, from 1.
            stats: statistics of its steps.
            evaluation: results of the last evaluation.
            seconds: seconds by part of the cycle.

        Raises:
            OutriderError: the disk is full.
        """
        non_empty = [step for step in stats if step.columns]
        loss = round(sum(step.loss for step in non_empty) / max(len(non_empty), 1), 5)
        acceptances = [step.acceptance for step in stats if step.alpha_counts]
        alphas = [round(sum(values) / len(values), 4) for values in zip(*acceptances, strict=False)]
        line = {
            "cycle": cycle,
            "loss": loss,
            "alpha": alphas,
            "tokens": int(sum(step.columns for step in stats)),
            "evaluation": dict(evaluation),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }
        self.lines.append(line)
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _write_error(self._file, error) from error
        self._write_events(line)

    def close(self) -> None:
        if self._events:
            self._events.close()

    def _write_events(self, line: Mapping[str, Any]) -> None:
        if not self._events:
            return
        self._events.add_scalar("loss", line["loss"], line["cycle"])
        for position, alpha in enumerate(line["alpha"], 1):
            self._events.add_scalar(f"alpha/{position}", alpha, line["cycle"])
        for name, result in line["evaluation"].items():
            self._events.add_scalar(f"tau/{name}", result["tau"], line["cycle"])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log in a folder, up to the first damaged one. An empty list if there is no log."""
    lines = []
    try:
        for text in (folder / FILE).read_text("utf-8").splitlines():
            line = json.loads(text)
            lines.append({key: line[key] for key in ("cycle", "loss", "alpha", "tokens", "evaluation", "seconds")})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return lines


def write(file: Path, text: str) -> None:
    """Write a file completely or not at all. Raises OutriderError if the file cannot be written."""
    temporary = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")
        temporary.replace(file)
    except OSError as error:
        raise _write_error(file, error) from error


def _write_error(file: Path, error: OSError) -> OutriderError:
    return OutriderError(f"{file} cannot be written ({error}); free some space, and run the same command again")


def _tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # needs the optional package tensorboard
    except ImportError as error:
        raise OutriderError("--tensorboard needs TensorBoard; run pip install tensorboard") from error
    return SummaryWriter(str(folder / "events"))
