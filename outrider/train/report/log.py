"""How a training went: one JSON line a wave, and the same for TensorBoard where it is wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.train.trainer import Sums

FILE = "log.jsonl"


class Log:
    """Goes on behind wave `begin` of what was there."""

    def __init__(self, folder: Path, *, begin: int, events: bool) -> None:
        """Make ready.

        Raises:
            OutriderError: the folder cannot be written, or TensorBoard is missing.
        """
        self._events = _writer(folder) if events else None
        self._file, self.lines = folder / FILE, [line for line in read_log(folder) if line["wave"] <= begin]
        write(self._file, "".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured last, empty where nothing was."""
        return dict(self.lines[-1]["held_out"]) if self.lines else {}

    def add(self, wave: int, sums: Sequence[Sums], figures: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Note a wave: the mean loss of its steps, what was measured last, and what took how long.

        Raises:
            OutriderError: the disk is full.
        """
        steps = [each for each in sums if each.columns]
        loss = round(sum(each.loss for each in steps) / max(len(steps), 1), 5)
        seen = [each.acceptance for each in sums if each.met]
        alphas = [round(sum(some) / len(some), 4) for some in zip(*seen, strict=False)]
        line = {
            "wave": wave,
            "loss": loss,
            "alpha": alphas,
            "tokens": int(sum(each.columns for each in sums)),
            "held_out": dict(figures),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }
        self.lines.append(line)
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _full(self._file, error) from error
        self._show(line)

    def close(self) -> None:
        if self._events:
            self._events.close()

    def _show(self, line: Mapping[str, Any]) -> None:
        if not self._events:
            return
        self._events.add_scalar("loss", line["loss"], line["wave"])
        for position, alpha in enumerate(line["alpha"], 1):
            self._events.add_scalar(f"alpha/{position}", alpha, line["wave"])
        for name, each in line["held_out"].items():
            self._events.add_scalar(f"tau/{name}", each["tau"], line["wave"])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a training's log, none where there is none; what was cut off is left out, and all behind it."""
    out = []
    try:
        for line in (folder / FILE).read_text("utf-8").splitlines():
            entry = json.loads(line)
            out.append({key: entry[key] for key in ("wave", "loss", "alpha", "tokens", "held_out", "seconds")})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return out


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OutriderError: it cannot be written.
    """
    fresh = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, "utf-8")
        fresh.replace(file)
    except OSError as error:
        raise _full(file, error) from error


def _full(file: Path, error: OSError) -> OutriderError:
    return OutriderError(f"{file} cannot be written ({error}); free some space, and run the same command again")


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # takes a package of its own
    except ImportError as error:
        raise OutriderError("--tensorboard takes TensorBoard; run pip install tensorboard") from error
    return SummaryWriter(str(folder / "events"))
